// The last events of the scheduler, in words.

import { html } from "../vendor/preact-htm.js";
import { clock } from "../format.js";

export function Events({ feed }) {
  const { snapshot } = feed;
  const events = snapshot?.activity?.events ?? [];
  if (!events.length) return html`<p>Nothing has happened yet.</p>`;
  return html`<div class="log" role="log" aria-label="Last events" tabindex="0">
    <ol>
      ${[...events].reverse().map((one) => html`<li class=${one.level}>
        <time>${clock(snapshot.at_s - one.age_s)}</time>
        <span class="level">${one.level}</span> ${one.text}
      </li>`)}
    </ol>
  </div>`;
}
