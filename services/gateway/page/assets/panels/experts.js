// Load of the experts by layer and rank.

import { html } from "../vendor/preact-htm.js";

export function Experts({ feed }) {
  return html`<p>This model has no experts.</p>`;
}
