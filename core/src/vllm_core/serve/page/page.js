// The page at /: talks to the same API as every other client. Texts reach the document as text, never as markup.

const $ = (id) => document.getElementById(id);
const POLL_MS = 1000;
const HISTORY = 120;

const messages = [];
const rates = [];
let last = null;
let running = null;

// Paths are relative to the page, so that a proxy may show it anywhere.
const at = (path) => new URL(path, document.baseURI).href;

function headers() {
  const key = $("key").value.trim();
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function getJson(path) {
  const answer = await fetch(at(path), { headers: headers() });
  if (!answer.ok) throw new Error(await errorOf(answer));
  return answer.json();
}

async function errorOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `HTTP ${answer.status}`;
  }
}

// -- chat

function show(role, text) {
  const entry = document.createElement("div");
  entry.className = `message ${role}`;
  entry.textContent = text;
  $("conversation").append(entry);
  entry.scrollIntoView({ block: "end" });
  return entry;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function say(text) {
  messages.push({ role: "user", content: text });
  show("user", text);
  const entry = show("assistant", "");
  running = new AbortController();
  setBusy(true);
  let answer = "";
  try {
    const response = await fetch(at("v1/chat/completions"), {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      signal: running.signal,
      body: JSON.stringify({
        model: $("model").value || undefined,
        messages,
        stream: true,
        stream_options: { include_usage: true },
        temperature: Number($("temperature").value),
        max_tokens: Number($("max-tokens").value),
      }),
    });
    if (!response.ok) throw new Error(await errorOf(response));
    let first = null;
    let pieces = 0;
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const now = performance.now();
      const piece = chunk.choices[0]?.delta?.content;
      if (piece) {
        answer += piece;
        entry.textContent = answer;
        pieces += 1;
        first ??= now;
        showAnswerRate(pieces, now - first);
      }
      if (chunk.usage) showAnswerRate(chunk.usage.completion_tokens, now - (first ?? now));
    }
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  } finally {
    if (answer) messages.push({ role: "assistant", content: answer });
    else {
      messages.pop();
      entry.remove();
    }
    running = null;
    setBusy(false);
  }
}

function showAnswerRate(tokens, ms) {
  if (tokens > 1 && ms > 0) $("answer-rate").textContent = `${((tokens - 1) / (ms / 1000)).toFixed(1)} tokens/s`;
}

function setBusy(busy) {
  $("send").disabled = busy;
  $("stop").disabled = !busy;
}

// -- numbers

// Prometheus' text form: name{labels} value. Samples of one name are added up.
function readMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)/.exec(line);
    if (match) found.set(match[1], (found.get(match[1]) ?? 0) + Number(match[3]));
  }
  return found;
}

async function poll() {
  try {
    const answer = await fetch(at("metrics"), { headers: headers() });
    const found = readMetrics(await answer.text());
    const ready = found.has("vllm:num_requests_running");
    setState(ready, ready ? "ready" : "engine is starting");
    if (ready) showMetrics(found);
  } catch {
    setState(false, "server is gone");
    last = null;
  }
  setTimeout(poll, POLL_MS);
}

function showMetrics(found) {
  const now = { at: performance.now(), tokens: found.get("vllm:generation_tokens_total") ?? 0 };
  if (last && now.tokens >= last.tokens) {
    rates.push((now.tokens - last.tokens) / ((now.at - last.at) / 1000));
    rates.splice(0, rates.length - HISTORY);
    $("rate").textContent = `${rates.at(-1).toFixed(1)} tokens/s`;
    drawRates();
  }
  last = now;
  $("running").textContent = found.get("vllm:num_requests_running");
  $("waiting").textContent = found.get("vllm:num_requests_waiting");
  const kv = found.get("vllm:kv_cache_usage_perc") ?? 0;
  $("kv").value = kv;
  $("kv-text").textContent = `${(100 * kv).toFixed(1)} %`;
}

function drawRates() {
  const top = Math.max(1, ...rates);
  const points = rates.map((rate, index) => `${HISTORY - rates.length + index},${29 - (28 * rate) / top}`);
  $("line").setAttribute("points", points.join(" "));
}

function setState(ok, text) {
  $("state").textContent = text;
  $("state").dataset.ok = ok;
}

// -- plan

function row(body, cells) {
  const line = body.insertRow();
  for (const cell of cells) line.insertCell().textContent = cell;
}

function pair(list, name, value) {
  const term = document.createElement("dt");
  const text = document.createElement("dd");
  term.textContent = name;
  text.textContent = value;
  list.append(term, text);
}

function showPlan(plan) {
  const list = $("plan");
  list.replaceChildren();
  pair(list, "Platform", `${plan.platform} (${plan.distribution} ${plan.distribution_version})`);
  pair(list, "Why", plan.reasons.platform ?? "");
  pair(list, "Device", `${plan.device.name}, ${plan.device.architecture}`);
  pair(list, "Model", `${plan.architecture}, track ${plan.track}`);
  pair(list, "Dtype", `${plan.dtype}, KV ${plan.kv_dtype}`);
  pair(list, "Graphs", plan.graphs ? "captured" : "off");
  for (const group of plan.kv_groups) {
    pair(list, `KV group ${group.spec.index}`, `${group.spec.kind}, blocks of ${group.layout.tokens_per_block} tokens`);
  }
  for (const one of plan.demotions) pair(list, "Demoted", `${one.op}: ${one.provider}, ${one.cause}`);
  for (const note of plan.notes) pair(list, "Note", note);
  fill("rejected", "Rejected", plan.rejected, (one) => [one.subject, one.candidate, one.reason]);
  fill("bindings", "Providers", plan.bindings, (one) => [one.op, one.role, `${one.provider} (${one.kind})`]);
}

function fill(id, title, rows, cells) {
  const body = $(id).tBodies[0];
  body.replaceChildren();
  for (const one of rows) row(body, cells(one));
  $(`${id}-title`).textContent = `${title}: ${rows.length}`;
}

async function load() {
  try {
    const models = (await getJson("v1/models")).data;
    $("model").replaceChildren(...models.map((one) => new Option(one.id, one.id)));
    showPlan(await getJson("plan"));
    $("key-label").classList.remove("wanted");
  } catch (error) {
    $("plan").replaceChildren();
    pair($("plan"), "Not shown", error.message);
  }
}

// -- wiring

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  say(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  $("conversation").replaceChildren();
});
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  load();
});
$("key").value = sessionStorage.getItem("key") ?? "";
load();
poll();
