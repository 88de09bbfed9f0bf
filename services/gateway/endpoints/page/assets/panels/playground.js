// A place to try the model: tools, reasoning, schemas, log probabilities, and speculation on and
// off side by side.

import { html, useRef, useState } from "../vendor/preact-htm.js";
import { count, fixed, seconds } from "../format.js";
import { eventsOf } from "../sse.js";

const TOOL = JSON.stringify(
  [{ type: "function", function: { name: "weather", description: "Weather of a city", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }],
  null, 2,
);
const SCHEMA = JSON.stringify({ type: "object", properties: { answer: { type: "string" } }, required: ["answer"], additionalProperties: false }, null, 2);

// Returns the JSON of a field, or undefined for an empty one.
function parsed(text, name) {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not JSON: ${error.message}`);
  }
}

function bodyOf(form, messages, model) {
  const value = (name) => form.get(name)?.toString() ?? "";
  const schema = parsed(value("schema"), "The schema");
  const body = {
    model, messages, stream: true, stream_options: { include_usage: true },
    max_tokens: Number(value("max_tokens")) || undefined,
    temperature: Number(value("temperature")),
    tools: parsed(value("tools"), "The list of tools"),
    response_format: schema && { type: "json_schema", json_schema: { name: "answer", schema, strict: true } },
  };
  if (value("seed")) body.seed = Number(value("seed"));
  if (form.get("logprobs")) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

function addDelta(answer, delta) {
  answer.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  answer.content += delta.content ?? "";
  for (const call of delta.tool_calls ?? []) {
    const known = (answer.calls[call.index] ??= { id: "", name: "", arguments: "" });
    known.id ||= call.id ?? "";
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
}

// Streams one answer; calls show with the answer so far.
async function ask(body, headers, signal, show) {
  const answer = { content: "", reasoning: "", calls: [], logprobs: [], usage: null, drafts: null, error: "", firstS: null, totalS: null };
  const began = performance.now();
  const elapsed = () => (performance.now() - began) / 1e3;
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", signal, headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const events of eventsOf(response)) {
      for (const { data } of events.filter((one) => one.data !== "[DONE]")) {
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        const choice = chunk.choices[0];
        if (choice?.delta) {
          if (answer.firstS == null && (choice.delta.content || choice.delta.reasoning_content || choice.delta.tool_calls)) answer.firstS = elapsed();
          addDelta(answer, choice.delta);
          answer.logprobs.push(...(choice.logprobs?.content ?? []));
        }
        if (chunk.usage) answer.usage = chunk.usage;
      }
      answer.totalS = elapsed();
      show({ ...answer });
    }
  } catch (error) {
    answer.error = error.name === "AbortError" ? "Stopped." : error.message;
    show({ ...answer });
  }
  return answer;
}

function Logprobs({ tokens }) {
  return html`<p class="tokens">
    ${tokens.map((one) => {
      const share = Math.exp(one.logprob);
      const others = one.top_logprobs.map((other) => `${JSON.stringify(other.token)} ${(100 * Math.exp(other.logprob)).toFixed(1)} %`).join(", ");
      return html`<span class="token p${Math.min(4, Math.floor(share * 5))}" title="${(100 * share).toFixed(1)} %; ${others}">${one.token}</span>`;
    })}
  </p>`;
}

function Answer({ answer, title }) {
  const details = answer.usage?.completion_tokens_details;
  const speed = answer.usage && answer.totalS > answer.firstS ? (answer.usage.completion_tokens - 1) / (answer.totalS - answer.firstS) : null;
  return html`<article class="answer">
    ${title && html`<h3>${title}</h3>`}
    ${answer.reasoning && html`<details open><summary>Reasoning</summary><p class="text">${answer.reasoning}</p></details>`}
    ${answer.logprobs.length ? html`<${Logprobs} tokens=${answer.logprobs} />` : answer.content && html`<p class="text">${answer.content}</p>`}
    ${answer.calls.map((call) => html`<p class="call">Calls <code>${call.name}(${call.arguments})</code></p>`)}
    ${answer.error && html`<p role="alert" class="problem">${answer.error}</p>`}
    ${answer.usage && html`<p class="hint">
      ${count(answer.usage.prompt_tokens)} prompt tokens (${count(answer.usage.prompt_tokens_details?.cached_tokens)} cached),
      ${" "}${count(answer.usage.completion_tokens)} generated, first after ${seconds(answer.firstS)}, ${fixed(speed)} tokens/s
      ${details?.accepted_prediction_tokens ? `, ${count(details.accepted_prediction_tokens)} drafts accepted` : ""}
    </p>`}
  </article>`;
}

function turn(answer) {
  const calls = answer.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  return { role: "assistant", content: answer.content || null, ...(calls.length ? { tool_calls: calls } : {}) };
}

function Said({ message }) {
  const text = message.role === "tool" ? `Result of a call: ${message.content}` : message.content;
  return html`<p class="said ${message.role}">
    <strong>${{ user: "You", assistant: "Model", tool: "Tool" }[message.role]}:</strong>
    ${" "}<span class="text">${text ?? ""}</span>
    ${(message.tool_calls ?? []).map((call) => html` <code>${call.function.name}(${call.function.arguments})</code>`)}
  </p>`;
}

export function Playground({ feed }) {
  const [messages, setMessages] = useState([]);
  const [answers, setAnswers] = useState([]);
  const [problem, complain] = useState("");
  const [isBusy, setBusy] = useState(false);
  const stop = useRef(null);
  const model = feed.snapshot?.status.scheduler?.model;
  const pending = messages.at(-1)?.tool_calls ?? [];

  const send = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const text = form.get("prompt").trim();
    if (!text) return;
    const asked = pending.length
      ? pending.map((call) => ({ role: "tool", tool_call_id: call.id, content: text }))
      : [{ role: "user", content: text }];
    const system = form.get("system").trim();
    const conversation = [...messages, ...asked];
    complain("");
    let body;
    try {
      body = bodyOf(form, [...(system ? [{ role: "system", content: system }] : []), ...conversation], model);
    } catch (error) {
      complain(error.message);
      return;
    }
    const variants = form.get("compare") ? [["Speculation as configured", {}], ["Speculation off", { speculation: { method: "off" } }]] : [["", {}]];
    event.target.elements.prompt.value = "";
    setMessages(conversation);
    setBusy(true);
    stop.current = new AbortController();
    const shown = variants.map(([title]) => ({ title, answer: null }));
    const done = [];
    // One after the other: beside each other they would slow each other down.
    for (const [place, [, more]] of variants.entries()) {
      done.push(await ask({ ...body, ...more }, feed.headers(), stop.current.signal, (answer) => {
        shown[place] = { ...shown[place], answer };
        setAnswers([...shown]);
      }));
    }
    setBusy(false);
    if (variants.length > 1 || done[0].error) return;
    setMessages([...conversation, turn(done[0])]);
  };
  const clear = () => {
    setMessages([]);
    setAnswers([]);
  };
  const last = messages.at(-1)?.role === "assistant";
  return html`
    <div class="talk" role="log" aria-label="Conversation">
      ${(last ? messages.slice(0, -1) : messages).map((message, index) => html`<${Said} key=${index} message=${message} />`)}
    </div>
    <div class="answers">${answers.filter((one) => one.answer).map((one) => html`<${Answer} key=${one.title} ...${one} />`)}</div>
    ${problem && html`<p role="alert" class="problem">${problem}</p>`}
    <form class="play" onSubmit=${send}>
      <label class="wide">${pending.length ? "Result of the tool" : "Message"}
        <textarea name="prompt" rows="3" required></textarea></label>
      <div class="controls">
        <button disabled=${isBusy || !model}>Send</button>
        <button type="button" disabled=${!isBusy} onClick=${() => stop.current?.abort()}>Stop</button>
        <button type="button" disabled=${isBusy} onClick=${clear}>New conversation</button>
      </div>
      <details>
        <summary>Options</summary>
        <label class="wide">System message <textarea name="system" rows="2"></textarea></label>
        <label>Temperature <input name="temperature" type="number" min="0" max="2" step="0.1" value="0.7" /></label>
        <label>Longest answer in tokens <input name="max_tokens" type="number" min="1" value="256" /></label>
        <label>Seed <input name="seed" type="number" min="0" /></label>
        <label><input name="logprobs" type="checkbox" /> Log probabilities</label>
        <label><input name="compare" type="checkbox" /> Speculation on and off, one after the other</label>
        <label class="wide">Tools, as OpenAI's API has them <textarea name="tools" rows="3" placeholder=${TOOL} spellcheck="false"></textarea></label>
        <label class="wide">Schema of the answer <textarea name="schema" rows="3" placeholder=${SCHEMA} spellcheck="false"></textarea></label>
      </details>
    </form>
  `;
}
