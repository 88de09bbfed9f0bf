// Load of the experts by layer, and by the rank that holds them.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { count, fixed, percent } from "../format.js";

const CELL = 6;

const sum = (values) => values.reduce((total, one) => total + one, 0);

// One row for each layer, one cell for each expert: the darker, the more tokens it got.
function Heat({ layers }) {
  const canvas = useRef(null);
  const width = Math.max(...layers.map((layer) => layer.counts.length));
  useEffect(() => {
    const context = canvas.current.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    context.clearRect(0, 0, canvas.current.width, canvas.current.height);
    context.fillStyle = style.getPropertyValue("--accent");
    layers.forEach((layer, row) => {
      const most = Math.max(1, ...layer.counts);
      layer.counts.forEach((one, expert) => {
        context.globalAlpha = one ? 0.1 + (0.9 * one) / most : 0.02;
        context.fillRect(expert * CELL, row * CELL, CELL - 1, CELL - 1);
      });
    });
  }, [layers]);
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Load of each expert">
    <canvas ref=${canvas} width=${width * CELL} height=${layers.length * CELL} role="img"
      aria-label="Load of ${width} experts in ${layers.length} layers; the table below has figures for each layer"></canvas>
  </div>`;
}

function Ranks({ layers }) {
  const ranks = layers[0].ranks.map((one) => one.rank);
  const total = sum(layers.map((layer) => layer.load));
  if (ranks.length < 2) return null;
  return html`<p>
    ${ranks.map((rank) => {
      const load = sum(layers.map((layer) => layer.ranks.find((one) => one.rank === rank)?.load ?? 0));
      return html`<span class="fact">Rank ${rank}: ${percent(load / total)} of the load. </span>`;
    })}
  </p>`;
}

export function Experts({ feed }) {
  const [all, showAll] = useState(false);
  const layers = feed.experts;
  if (!layers.length) return html`<p>No tokens of routed experts have been counted: the model has none, or has served too few steps.</p>`;
  const worst = [...layers].sort((a, b) => b.expert_imbalance - a.expert_imbalance);
  const shown = all ? layers : worst.slice(0, 5);
  return html`
    <${Ranks} layers=${layers} />
    <${Heat} layers=${layers} />
    <div class="scroll" tabindex="0" role="region" aria-label="Table of layers with experts">
      <table>
        <caption>${all ? "Layers" : "Layers with the most uneven load"}: tokens of the busiest expert, and of the busiest rank, relative to the mean</caption>
        <thead><tr><th scope="col">Layer</th><th scope="col">Tokens × experts</th><th scope="col">Busiest expert</th><th scope="col">Relative</th><th scope="col">Busiest rank, relative</th></tr></thead>
        <tbody>
          ${shown.map((layer) => html`<tr key=${layer.layer}>
            <th scope="row">${layer.layer}</th><td>${count(layer.load)}</td>
            <td>${layer.busiest_expert}</td><td>${fixed(layer.expert_imbalance, 2)}</td>
            <td>${fixed(layer.rank_imbalance, 2)}</td>
          </tr>`)}
        </tbody>
      </table>
    </div>
    ${layers.length > 5 && html`<button type="button" onClick=${() => showAll(!all)}>${all ? "Show the most uneven" : `Show all ${layers.length}`}</button>`}
  `;
}
