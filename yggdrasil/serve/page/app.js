// The page of `ygg serve`: it talks to the server's public routes, and to nothing else.
"use strict";

const at = (id) => document.getElementById(id);
const KEY = "ygg-api-key";
const MOST_STEPS = 500; // trees that are kept of a conversation
const MOST_TOKENS = 128; // of an answer at first; half of a shorter context
const POLL_MS = 1000; // between two readings of the metrics, while an answer runs

const state = {
  model: "",
  isChat: false,
  messages: [], // {role, content}, of an answer also reasoning_content
  steps: [], // {tree, chunk}
  shown: -1,
  follows: true, // whether the newest step is shown
  running: null, // the AbortController of the answer that runs
};

// ---- requests ----

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  if (!key) return more;
  const bytes = new TextEncoder().encode(key); // a header takes no character above 255
  return { ...more, Authorization: `Bearer ${String.fromCharCode(...bytes)}` };
}

async function fetched(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(options.headers) });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const failure = new Error(body?.error?.message ?? `the server answered ${response.status}`);
  failure.status = response.status;
  throw failure;
}

// Asks for the key until the server takes it.
async function withKey(action) {
  for (let isAgain = false; ; isAgain = true) {
    try {
      return await action();
    } catch (failure) {
      if (failure.status !== 401) throw failure;
      await askKey(isAgain || Boolean(sessionStorage.getItem(KEY)));
    }
  }
}

function askKey(wasRefused) {
  sessionStorage.removeItem(KEY);
  at("key-error").textContent = wasRefused ? "The server did not take this key." : "";
  at("key").value = "";
  const dialog = at("key-dialog");
  if (!dialog.open) dialog.showModal();
  dialog.onclose = () => {
    // a second Esc closes it, whatever its "cancel" event is answered
    if (!dialog.open && !sessionStorage.getItem(KEY)) dialog.showModal();
  };
  return new Promise((resolve) => {
    at("key-form").onsubmit = () => {
      sessionStorage.setItem(KEY, at("key").value.trim());
      resolve();
    };
  });
}

// Every JSON object of a stream of server-sent events.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// ---- the conversation ----

function parameters() {
  const number = (id) => (at(id).value === "" ? undefined : Number(at(id).value));
  return {
    model: state.model,
    temperature: number("temperature"),
    top_p: number("top_p"),
    seed: number("seed"),
    max_tokens: number("max_tokens"),
    speculation: at("speculation").checked ? "auto" : "off",
    stream: true,
    stream_options: { include_usage: true, include_trees: true },
  };
}

function bodyOf() {
  if (state.isChat) return ["/v1/chat/completions", { ...parameters(), messages: state.messages }];
  const text = state.messages.map((message) => message.content).join("");
  return ["/v1/completions", { ...parameters(), prompt: text }];
}

function addMessage(role, content) {
  const paragraph = document.createElement("p");
  paragraph.className = `message ${role}`;
  paragraph.textContent = content;
  at("log").append(paragraph);
  at("log").scrollTop = at("log").scrollHeight;
  return paragraph;
}

async function send(event) {
  event?.preventDefault();
  const text = at("prompt").value;
  if (state.running || !state.model || text.trim() === "") return;
  showError("");
  at("prompt").value = "";
  const { messages } = state; // a new conversation has others
  messages.push({ role: "user", content: text });
  const asked = addMessage("user", text);
  const answer = addMessage("assistant", "");
  const reply = { role: "assistant", content: "", reasoning_content: "" };
  const [path, body] = bodyOf();
  begin();
  try {
    await withKey(() => stream(path, body, answer, reply));
  } catch (failure) {
    if (failure.name !== "AbortError") showError(failure.message);
    if (isEmpty(reply)) {
      messages.pop();
      asked.remove();
      answer.remove();
      if (messages === state.messages) at("prompt").value = text;
    }
  }
  if (!isEmpty(reply)) messages.push(reply);
  end();
}

function isEmpty(reply) {
  return reply.content === "" && reply.reasoning_content === "";
}

async function stream(path, body, answer, reply) {
  const { signal } = state.running;
  const response = await fetched(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const started = performance.now();
  let tokens = 0;
  for await (const event of eventsOf(response)) {
    signal.throwIfAborted(); // an event may have been read before the end
    for (const choice of event.choices) {
      const delta = choice.delta ?? { content: choice.text };
      const reasoning = delta.reasoning_content ?? ""; // the first delta has both
      const content = delta.content ?? "";
      reply.reasoning_content += reasoning;
      reply.content += content;
      const chunk = addChunk(answer, reasoning + content);
      if (choice.tree) {
        tokens += choice.tree.path.length;
        addStep(choice.tree, chunk);
        at("rate").textContent = ((tokens / (performance.now() - started)) * 1e3).toFixed(0);
      }
    }
    if (event.timings) showTimings(event.timings, body.speculation);
  }
}

function addChunk(answer, text) {
  if (text === "") return answer.lastElementChild;
  const isAtEnd = at("log").scrollTop + at("log").clientHeight > at("log").scrollHeight - 40;
  const chunk = document.createElement("span");
  chunk.className = "chunk";
  chunk.textContent = text;
  answer.append(chunk);
  if (isAtEnd) at("log").scrollTop = at("log").scrollHeight;
  return chunk;
}

function begin() {
  state.running = new AbortController();
  state.follows = true;
  at("send").disabled = true;
  at("stop").hidden = false;
  state.timer = setInterval(readMetrics, POLL_MS);
}

function end() {
  state.running = null;
  clearInterval(state.timer);
  at("send").disabled = false;
  at("stop").hidden = true;
  readMetrics();
  setTimeout(readMetrics, POLL_MS); // the batch reports a step after its events
}

function clear() {
  state.running?.abort();
  state.messages = [];
  state.steps = [];
  at("log").replaceChildren();
  at("tree").replaceChildren();
  at("steps").disabled = true;
  showError("");
  at("prompt").focus();
}

function showError(message) {
  at("error").textContent = message;
  at("error").hidden = message === "";
}

function showTimings(timings, speculation) {
  at("rate").textContent = timings.tokens_per_second.toFixed(0);
  at("aal").textContent = timings.tokens_per_pass.toFixed(2);
  at("first").textContent = `${timings.first_token_ms.toFixed(0)} ms`;
  const name = speculation === "off" ? "without speculation" : "with speculation";
  state.rates = { ...state.rates, [name]: timings.tokens_per_second };
  const rates = Object.entries(state.rates).map(([kind, rate]) => `${kind} ${rate.toFixed(0)} tokens/s`);
  at("runs").textContent = rates.length > 1 ? `last answers: ${rates.join(", ")}` : "";
}

// ---- the tree of a step, drawn as yggdrasil/picture.py draws it ----

const CHAR_WIDTH = 7.3;
const NODE_HEIGHT = 22;
const LINE_HEIGHT = 30;
const GAP = 26;
const MARGIN = 8;
const PADDING = 8;
const MIN_SCALE = 0.7; // a tree that is wider than its place shrinks down to this, then scrolls

function addStep(tree, chunk) {
  state.steps.push({ tree, chunk });
  if (state.steps.length > MOST_STEPS) {
    state.steps.shift();
    state.shown -= 1;
  }
  if (chunk && !chunk.onclick)
    chunk.onclick = () => choose(state.steps.findIndex((step) => step.chunk === chunk));
  at("steps").disabled = false;
  at("steps").max = state.steps.length - 1;
  if (state.follows) state.frame ??= requestAnimationFrame(showNewest);
}

function showNewest() {
  state.frame = undefined;
  show(state.steps.length - 1);
}

function choose(index) {
  state.follows = index === state.steps.length - 1;
  show(index);
}

function show(index) {
  const step = state.steps[index];
  if (!step) return;
  state.steps[state.shown]?.chunk?.classList.remove("shown");
  step.chunk?.classList.add("shown");
  state.shown = index;
  at("steps").value = index;
  if (!state.running) step.chunk?.scrollIntoView({ block: "nearest" });
  const { tree } = step;
  const verified = `${tree.nodes.length} verified, ${tree.path.length - 1} accepted`;
  const nodes = `${tree.drafted} nodes drafted, ${verified}`;
  const what = tree.drafted > 1 ? `${tree.shape}, ${nodes}` : "plain, no draft";
  const place = `Step ${index + 1} of ${state.steps.length}`;
  at("step-line").textContent = `${place}: ${what}, ${tree.ms.toFixed(1)} ms`;
  at("tree").replaceChildren(drawn(tree));
}

function element(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A token as a person reads it: its blanks are seen.
const quoted = (text) =>
  `'${text.replaceAll("\\", "\\\\").replaceAll("\n", "\\n").replaceAll("'", "\\'")}'`;

function nodesOf(tree) {
  const path = new Set(tree.path);
  const nodes = tree.nodes.map(([parent, text, logProb], node) => ({
    parent,
    label: quoted(text),
    rank: -logProb,
    kind: path.has(node) ? "accepted" : "rejected",
    note: `log-probability ${logProb.toFixed(2)}`,
  }));
  if (tree.bonus !== "")
    nodes.push({
      parent: tree.path.at(-1),
      label: quoted(tree.bonus),
      rank: -Infinity,
      kind: "bonus",
      note: "the target's own token after the path",
    });
  return nodes;
}

// Gives every node its depth and its line: leaves take one line after another.
function place(nodes) {
  nodes.forEach((node, index) => {
    node.children = [];
    node.depth = index ? nodes[node.parent].depth + 1 : 0;
    if (index) nodes[node.parent].children.push(node);
  });
  let used = 0;
  const visit = (node) => {
    node.line = used;
    node.children.sort((one, other) => one.rank - other.rank).forEach(visit);
    if (!node.children.length) used += 1;
  };
  visit(nodes[0]);
  return used;
}

function drawn(tree) {
  const nodes = nodesOf(tree);
  const numLines = place(nodes);
  const columns = [MARGIN];
  for (let depth = 0; nodes.some((node) => node.depth === depth); depth += 1) {
    const widths = nodes.filter((node) => node.depth === depth).map((node) => node.label.length);
    columns.push(columns[depth] + CHAR_WIDTH * Math.max(...widths) + 2 * PADDING + GAP);
  }
  for (const node of nodes) {
    node.left = columns[node.depth];
    node.width = CHAR_WIDTH * node.label.length + 2 * PADDING;
    node.centre = MARGIN + NODE_HEIGHT / 2 + LINE_HEIGHT * node.line;
  }
  const isBright = (node) => node.kind !== "rejected";
  const edges = nodes.slice(1).sort((one, other) => isBright(one) - isBright(other));
  const width = columns.at(-1) - GAP + MARGIN;
  const height = 2 * MARGIN + LINE_HEIGHT * numLines;
  const path = tree.path.map((node) => nodes[node].label).join(" ");
  const viewBox = `0 0 ${width} ${height}`;
  const image = element(
    "svg",
    { class: "ygg-tree", role: "img", "aria-label": `accepted: ${path}`, width, height, viewBox },
    ...edges.map((node) => edge(nodes[node.parent], node)),
    ...nodes.map(box),
  );
  image.style.minWidth = `${MIN_SCALE * width}px`;
  return image;
}

function edge(parent, node) {
  const bend = node.left - GAP / 2;
  const d = `M${parent.left + parent.width} ${parent.centre}H${bend}V${node.centre}H${node.left}`;
  return element("path", { class: node.kind, d });
}

function box(node) {
  const y = node.centre - NODE_HEIGHT / 2;
  return element(
    "g",
    { class: node.kind },
    element("title", {}, node.note),
    element("rect", { x: node.left, y, width: node.width, height: NODE_HEIGHT, rx: 5 }),
    element("text", { x: node.left + PADDING, y: node.centre + 4 }, node.label.replaceAll(" ", "\u00a0")),
  );
}

// ---- the server's state, from its metrics ----

// {name: [{labels, value}]} of the text that Prometheus reads.
function parsed(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const pairs = [...(match[2] ?? "").matchAll(/(\w+)="([^"]*)"/g)];
    const labels = Object.fromEntries(pairs.map((pair) => [pair[1], pair[2]]));
    (found[match[1]] ??= []).push({ labels, value: Number(match[3]) });
  }
  return found;
}

async function readMetrics() {
  try {
    const response = await fetched("/metrics");
    showMetrics(parsed(await response.text()));
  } catch {
    at("requests").textContent = "the server does not answer";
  }
}

function showMetrics(metrics) {
  const samples = (name) => metrics[name] ?? [];
  const total = (name) => samples(name).reduce((sum, sample) => sum + sample.value, 0);
  const by = (name, label) => new Map(samples(name).map((sample) => [sample.labels[label], sample.value]));
  const requests = `${total("ygg_running_requests")} running, ${total("ygg_waiting_requests")} waiting`;
  const emitted = total("ygg_emitted_tokens_total");
  at("requests").textContent = `${requests}, ${emitted} tokens since the start`;
  const pages = by("ygg_kv_pages", "state");
  const used = pages.get("used") ?? 0;
  const all = used + (pages.get("free") ?? 0);
  at("pages").max = all || 1;
  at("pages").value = used;
  at("pages-text").textContent = all ? `${used} of ${all} in use` : "–";
  showDepths(by("ygg_accepted_at_depth_total", "depth"), by("ygg_rejected_at_depth_total", "depth"));
  showLoads(samples("ygg_goodput_tokens_per_second"));
}

// The share of paths that go on at each depth, of those that reached it and had a draft there.
function showDepths(accepted, rejected) {
  const names = new Set([...accepted.keys(), ...rejected.keys()]);
  const depths = [...names].map(Number).sort((one, other) => one - other);
  const rows = depths.map((depth) => {
    const kept = accepted.get(String(depth)) ?? 0;
    const share = kept / (kept + (rejected.get(String(depth)) ?? 0));
    const row = document.createElement("div");
    const meter = document.createElement("meter");
    meter.value = share;
    meter.setAttribute("aria-label", `depth ${depth}`);
    row.append(textOf(depth), meter, textOf(`${(100 * share).toFixed(0)} %`));
    return row;
  });
  if (rows.length) at("depths").replaceChildren(...rows);
}

function showLoads(samples) {
  const rows = samples
    .map(({ labels, value }) => [Number(labels.batch_size), Number(labels.gamma), value])
    .sort((one, other) => one[0] - other[0] || one[1] - other[1])
    .map(([requests, depth, rate]) => {
      const row = document.createElement("tr");
      for (const cell of [requests, depth || "plain", rate.toFixed(0)]) {
        const made = document.createElement("td");
        made.textContent = cell;
        row.append(made);
      }
      return row;
    });
  at("loads").tBodies[0].replaceChildren(...rows);
}

function textOf(text) {
  const made = document.createElement("span");
  made.textContent = text;
  return made;
}

// ---- the beginning ----

async function connect() {
  try {
    const info = await withKey(async () => (await fetched("/server_info")).json());
    state.model = info.model;
    state.isChat = info.chat_template === "model";
    at("model").textContent = `${info.model}, policy ${info.policy}`;
    at("max_tokens").value = Math.min(MOST_TOKENS, Math.floor(info.max_context / 2));
    at("hint").textContent = state.isChat
      ? ""
      : "This model has no chat template: it continues your text, and the text goes on with what you add.";
    at("prompt-label").textContent = state.isChat ? "Your message" : "Your text";
    at("log").classList.toggle("story", !state.isChat);
    if (!state.isChat) at("prompt").placeholder = "Once upon a time";
    readMetrics();
  } catch (failure) {
    at("model").textContent = "not connected";
    showError(failure.message);
  }
  at("prompt").focus();
}

function onKey(event) {
  if (event.key === "Escape" && !at("key-dialog").open) state.running?.abort();
  if (event.altKey && (event.key === "ArrowLeft" || event.key === "ArrowRight") && state.steps.length) {
    event.preventDefault();
    const next = state.shown + (event.key === "ArrowLeft" ? -1 : 1);
    choose(Math.min(Math.max(next, 0), state.steps.length - 1));
  }
}

at("form").addEventListener("submit", send);
at("form").addEventListener("invalid", () => (at("parameters").open = true), true); // to be seen
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("form").requestSubmit(); // the browser checks the parameters first
});
at("stop").addEventListener("click", () => state.running?.abort());
at("new").addEventListener("click", clear);
at("steps").addEventListener("input", () => choose(Number(at("steps").value)));
at("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
document.addEventListener("keydown", onKey);
connect();
