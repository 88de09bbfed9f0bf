// The page: its head, the state of the connection, and one panel for each thing to see.

import { html, render, useEffect, useErrorBoundary, useState } from "./vendor/preact-htm.js";
import { Feed } from "./feed.js";
import { seconds } from "./format.js";
import { Cache } from "./panels/cache.js";
import { Charts } from "./panels/charts.js";
import { Cluster } from "./panels/cluster.js";
import { Events } from "./panels/events.js";
import { Experts } from "./panels/experts.js";
import { Playground } from "./panels/playground.js";
import { Streams } from "./panels/streams.js";
import { Timeline } from "./panels/timeline.js";

const PANELS = [
  ["cluster", "Cluster", Cluster],
  ["timeline", "Steps by rank", Timeline],
  ["streams", "Requests", Streams],
  ["cache", "Cache", Cache],
  ["events", "Events", Events],
  ["charts", "Throughput and latency", Charts],
  ["experts", "Experts", Experts],
  ["playground", "Playground", Playground],
];

function KeyForm({ feed }) {
  const submit = (event) => {
    event.preventDefault();
    feed.setKey(new FormData(event.target).get("key").trim());
  };
  return html`<form class="key" onSubmit=${submit}>
    <h2>API key</h2>
    <p role="alert">
      ${feed.state === "refused" ? "This key is not valid." : "This server needs an API key."} It stays in this tab.
    </p>
    <label for="key">Key</label>
    <input id="key" name="key" type="password" autocomplete="off" required />
    <button>Connect</button>
  </form>`;
}

function connection(feed) {
  if (feed.state === "live") return ["good", "connected"];
  if (feed.state === "connecting") return ["", "connecting …"];
  return ["bad", "not connected"];
}

function condition(feed) {
  const status = feed.snapshot?.status;
  if (!status) return ["", "unknown"];
  return status.ready ? ["good", "ready"] : ["bad", status.reason];
}

function Head({ feed }) {
  const scheduler = feed.snapshot?.status.scheduler;
  const [linkTone, link] = connection(feed);
  const [tone, words] = condition(feed);
  return html`<header>
    <h1>Lockstep</h1>
    <p>${scheduler?.model ?? ""}</p>
    <p role="status" class="state">
      ${feed.state === "live" && html`<span class="pill ${tone}">${words}</span>`}
      <span class="pill ${linkTone}">${link}</span>
    </p>
  </header>`;
}

// A panel that fails says so, and the others go on.
function Panel({ id, title, body, feed }) {
  const [error, forget] = useErrorBoundary((problem) => console.error(problem));
  return html`<section id=${id} aria-labelledby="${id}-title">
    <h2 id="${id}-title">${title}</h2>
    ${error
      ? html`<p role="alert">This panel has failed: ${error.message} <button type="button" onClick=${forget}>Try again</button></p>`
      : html`<${body} feed=${feed} />`}
  </section>`;
}

function App({ feed }) {
  const [, redraw] = useState(0);
  useEffect(() => {
    feed.onChange = () => redraw((n) => n + 1);
    feed.run();
  }, []);
  if (feed.state === "key" || feed.state === "refused") {
    return html`<${Head} feed=${feed} /><main><${KeyForm} feed=${feed} /></main>`;
  }
  const age = feed.snapshot ? Date.now() / 1e3 - feed.snapshot.at_s : 0;
  return html`<a class="skip" href="#streams">Skip to the requests</a>
    <${Head} feed=${feed} />
    <nav aria-label="Panels">
      ${PANELS.map(([id, title]) => html`<a href="#${id}">${title}</a>`)}
    </nav>
    ${feed.state === "lost" &&
    html`<p class="banner" role="alert">
      Not connected: ${feed.problem}. Trying again every second.
      ${feed.snapshot && age > 2 ? ` What you see is ${seconds(age)} old.` : ""}
    </p>`}
    <main>
      ${PANELS.map(([id, title, body]) => html`<${Panel} key=${id} id=${id} title=${title} body=${body} feed=${feed} />`)}
    </main>`;
}

render(html`<${App} feed=${new Feed(() => {})} />`, document.getElementById("app"));
