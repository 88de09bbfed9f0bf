// Throughput and latency of the last quarter of an hour.

import { html, useEffect, useRef } from "../vendor/preact-htm.js";
import { fixed } from "../format.js";

const CHARTS = [
  { title: "Tokens per second", unit: "tokens/s", lines: [["generated", "generated"], ["prompt", "prompt"]] },
  { title: "Time to first token", unit: "ms", lines: [["first50", "median"], ["first90", "90 %"], ["first99", "99 %"]] },
  { title: "Time between tokens", unit: "ms", lines: [["next50", "median"], ["next90", "90 %"], ["next99", "99 %"]] },
  { title: "Requests and memory", unit: "", lines: [["running", "running"], ["waiting", "waiting"], ["kvShare", "KV rows, %"]] },
];
const HEIGHT = 180;
const DASHES = [[], [6, 4], [2, 3]];

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function options(chart, width) {
  const [ink, grid] = [color("--ink"), color("--grid")];
  const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid } };
  return {
    width,
    height: HEIGHT,
    cursor: { show: false },
    legend: { show: false },
    axes: [axis, { ...axis, size: 60 }],
    scales: { y: { range: (_, low, high) => [0, Math.max(1, high * 1.1)] } },
    series: [{}, ...chart.lines.map((_, index) => ({
      stroke: color(`--line-${index}`), width: 2, dash: DASHES[index], spanGaps: false, points: { show: false },
    }))],
  };
}

function Chart({ chart, feed }) {
  const holder = useRef(null);
  const plot = useRef(null);
  const data = () => [feed.times, ...chart.lines.map(([name]) => feed.lines[name])];
  useEffect(() => {
    const make = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(chart, holder.current.clientWidth), data(), holder.current);
    };
    make();
    const watch = new ResizeObserver(() => plot.current?.setSize({ width: holder.current.clientWidth, height: HEIGHT }));
    watch.observe(holder.current);
    const theme = matchMedia("(prefers-color-scheme: dark)");
    theme.addEventListener("change", make);
    return () => {
      watch.disconnect();
      theme.removeEventListener("change", make);
      plot.current?.destroy();
    };
  }, []);
  useEffect(() => plot.current?.setData(data()), [feed.times]);
  const now = chart.lines.map(([name, words]) => `${words} ${fixed(feed.lines[name].at(-1))}`).join(", ");
  return html`<figure>
    <figcaption>
      <strong>${chart.title}</strong>
      <span class="now">
        ${chart.lines.map(([name, words], index) => html`<span class="line-${index}">${words} ${fixed(feed.lines[name].at(-1))}</span> `)}
        ${chart.unit}
      </span>
    </figcaption>
    <div ref=${holder} role="img" aria-label="${chart.title} over the last minutes; now ${now} ${chart.unit}"></div>
  </figure>`;
}

export function Charts({ feed }) {
  const model = feed.snapshot?.status.scheduler?.model;
  return html`
    <p>${model ? `Model ${model}. ` : ""}Latencies are of the last 15 seconds.</p>
    <div class="charts">${CHARTS.map((chart) => html`<${Chart} key=${chart.title} chart=${chart} feed=${feed} />`)}</div>
  `;
}
