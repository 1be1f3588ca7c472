// The chat: everything the server says is shown as text, and every request stays on its origin.
"use strict";

const $ = (id) => document.getElementById(id);
let running = null; // the AbortController of the answer under way

// -- conversations ------------------------------------------------------------------------------

function showList() {
  $("list").replaceChildren(
    ...store.chats.map((chat) => {
      const row = document.createElement("div");
      row.setAttribute("aria-current", String(chat.id === store.current));
      const title = element("button", chat.title, "title");
      title.onclick = () => switchTo(chat.id);
      const drop = element("button", "✕", "drop");
      drop.setAttribute("aria-label", `Delete ${chat.title}`);
      drop.onclick = () => dropChat(chat.id);
      row.append(title, drop);
      return row;
    }),
  );
}

function switchTo(id) {
  stopAnswer();
  store.current = id;
  save();
  document.body.classList.remove("menu");
  showAll();
}

function dropChat(id) {
  if (id === store.current) stopAnswer();
  store.chats = store.chats.filter((chat) => chat.id !== id);
  if (store.current === id) store.current = store.chats.length ? store.chats[0].id : null;
  save();
  showAll();
}

function showAll() {
  showList();
  const chat = currentChat();
  if (!chat || !chat.turns.length) {
    const empty = element("div", "Runs on your own machine.", "empty");
    empty.prepend(element("b", "What shall we talk about?"));
    $("log").replaceChildren(empty);
    return;
  }
  $("log").replaceChildren(...chat.turns.map((turn, at) => turnNode(turn, at === chat.turns.length - 1)));
  toEnd();
}

function turnNode(turn, isLast) {
  const node = element("article", undefined, `turn ${turn.role}`);
  const body = element("div", undefined, "text");
  fill(body, turn);
  node.append(body);
  if (turn.error) node.append(element("div", turn.error, "error"));
  if (turn.role === "assistant" && !turn.open) node.append(foot(turn, isLast));
  return node;
}

function fill(body, turn) {
  if (turn.role === "user") {
    body.textContent = turn.content;
    return;
  }
  const parts = [];
  if (turn.reasoning) {
    const think = element("details", undefined, "think");
    think.open = turn.open && !turn.content;
    think.append(element("summary", "Thoughts"), turn.reasoning);
    parts.push(think);
  }
  parts.push(renderMarkdown(turn.content));
  body.replaceChildren(...parts);
  body.classList.toggle("waiting", Boolean(turn.open && !turn.content && !turn.reasoning));
}

function foot(turn, isLast) {
  const row = element("div", undefined, "foot");
  if (isLast) {
    const again = element("button", "↻ Regenerate", "again");
    again.onclick = regenerate;
    row.append(again);
  }
  const copy = element("button", "Copy");
  copy.onclick = () => navigator.clipboard && navigator.clipboard.writeText(turn.content);
  row.append(copy);
  for (const figure of figures(turn)) row.append(element("span", figure));
  return row;
}

function figures(turn) {
  const t = turn.timings;
  const shown = [];
  if (t) {
    shown.push(`${t.predicted_per_second.toFixed(1)} tokens/s`, `${t.predicted_n} tokens`);
    const prompt = t.prompt_n + t.cache_n;
    shown.push(`prompt ${prompt} (${t.cache_n} cached) in ${(t.prompt_ms / 1000).toFixed(2)} s`);
  }
  if (turn.finish === "length") shown.push("cut at the token limit");
  if (turn.finish === "stopped") shown.push("stopped");
  return shown;
}

function toEnd() {
  const log = $("log");
  log.scrollTop = log.scrollHeight;
}

// -- asking -------------------------------------------------------------------------------------

async function ask(text) {
  const chat = currentChat() || openChat();
  if (!chat.turns.length) chat.title = text.slice(0, 60);
  chat.turns.push({ role: "user", content: text });
  await answer(chat);
}

async function regenerate() {
  const chat = currentChat();
  if (running || !chat) return;
  while (chat.turns.length && chat.turns[chat.turns.length - 1].role === "assistant") chat.turns.pop();
  if (chat.turns.length) await answer(chat);
}

function requestBody(chat) {
  const messages = chat.turns
    .filter((turn) => turn.content || turn.role === "user")
    .map((turn) => ({ role: turn.role, content: turn.content }));
  if (store.system.trim()) messages.unshift({ role: "system", content: store.system });
  return {
    model: $("model").value,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    timings: true,
    ...store.samplers,
  };
}

async function answer(chat) {
  stopAnswer();
  const body = requestBody(chat);
  const turn = { role: "assistant", content: "", open: true };
  chat.turns.push(turn);
  const control = (running = new AbortController());
  showAll();
  showRunning();
  const draw = drawer(chat, turn);
  try {
    for await (const event of stream(body, control.signal)) {
      take(turn, event);
      draw();
    }
  } catch (error) {
    if (control.signal.aborted) turn.finish = "stopped";
    else turn.error = String(error.message || error);
  }
  delete turn.open;
  if (running === control) running = null;
  save();
  if (chat.id === store.current) showAll();
  showRunning();
  refresh();
}

function drawer(chat, turn) {
  let asked = false;
  return () => {
    if (asked || chat.id !== store.current) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      const log = $("log");
      const body = log.lastElementChild && log.lastElementChild.querySelector(".text");
      if (!turn.open || !body || chat.id !== store.current) return;
      const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
      fill(body, turn);
      if (follows) toEnd();
    });
  };
}

function take(turn, event) {
  if (event.error) throw new Error(event.error.message);
  if (event.timings) turn.timings = event.timings;
  const choice = event.choices[0];
  if (!choice) return;
  turn.content += choice.delta.content || "";
  if (choice.delta.reasoning_content) {
    turn.reasoning = (turn.reasoning || "") + choice.delta.reasoning_content;
  }
  if (choice.finish_reason) turn.finish = choice.finish_reason;
}

async function* stream(body, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw new Error(await reason(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith("data: {")) yield JSON.parse(event.slice(6));
    }
  }
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

function stopAnswer() {
  if (running) running.abort();
}

function showRunning() {
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  $("send").disabled = !$("input").value.trim();
}

// -- server -------------------------------------------------------------------------------------

async function loadModels() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await reason(response));
    const models = (await response.json()).data;
    const before = $("model").value;
    $("model").replaceChildren(...models.map((model) => new Option(model.id, model.id)));
    const kept = models.find((m) => m.id === before) || models.find((m) => m.loaded) || models[0];
    if (kept) $("model").value = kept.id;
    $("state").classList.remove("bad");
    $("state").textContent = kept && kept.max_model_len ? `${kept.max_model_len.toLocaleString("en")} tokens of context` : "";
  } catch (error) {
    $("state").classList.add("bad");
    $("state").textContent = error.message;
  }
}

async function refresh() {
  if (document.hidden) return;
  try {
    const response = await fetch("metrics", { headers: headers() });
    if (!response.ok) return;
    showMetrics(parseMetrics(await response.text()));
  } catch {
    for (const name of ["memory", "cache", "running", "waiting", "hits"]) $(`m-${name}`).textContent = "–";
  }
}

function showMetrics(found) {
  const memory = found.process_resident_memory_bytes;
  const share = found.ingle_kv_cache_usage_perc;
  const looked = found.ingle_prefix_cache_queries_total;
  $("m-memory").textContent = memory ? `${(memory / 2 ** 30).toFixed(2)} GiB` : "–";
  $("m-cache").textContent = share === undefined ? "no model" : `${(100 * share).toFixed(0)} %`;
  $("m-cache-bar").value = share || 0;
  $("m-running").textContent = found.ingle_num_requests_running ?? 0;
  $("m-waiting").textContent =
    (found.ingle_num_requests_waiting || 0) + (found.ingle_num_requests_waiting_for_model || 0);
  $("m-hits").textContent = looked
    ? `${((100 * found.ingle_prefix_cache_hits_total) / looked).toFixed(0)} %`
    : "–";
}

// -- settings -----------------------------------------------------------------------------------

function showSamplers() {
  $("samplers").replaceChildren(
    ...SAMPLERS.map(([name, label, min, max, step]) => {
      const row = element("label", label, "sampler");
      const input = document.createElement("input");
      Object.assign(input, { type: "number", name, min, max, step, placeholder: "default" });
      input.value = store.samplers[name] ?? "";
      input.oninput = () => {
        if (input.value === "" || !input.checkValidity()) delete store.samplers[name];
        else store.samplers[name] = Number(input.value);
        save();
      };
      row.append(input);
      return row;
    }),
  );
}

function showTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = store.theme || (dark ? "dark" : "light");
}

function togglePanel(open) {
  $("panel").hidden = !open;
  $("tune").setAttribute("aria-expanded", String(open));
}

function fit() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  showRunning();
}

function submit(event) {
  event.preventDefault();
  const text = $("input").value.trim();
  if (!text || running) return;
  $("input").value = "";
  fit();
  ask(text);
}

function wire() {
  $("composer").onsubmit = submit;
  $("input").oninput = fit;
  $("input").onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  $("stop").onclick = stopAnswer;
  $("new").onclick = () => switchTo(null);
  $("menu").onclick = () => document.body.classList.toggle("menu");
  $("shade").onclick = () => document.body.classList.remove("menu");
  $("tune").onclick = () => togglePanel($("panel").hidden);
  $("close").onclick = () => togglePanel(false);
  $("theme").onclick = () => {
    store.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    save();
    showTheme();
  };
  $("system").value = store.system;
  $("system").oninput = () => {
    store.system = $("system").value;
    save();
  };
  $("key").value = apiKey();
  $("key").onchange = () => {
    sessionStorage.setItem("ingle.key", $("key").value.trim());
    loadModels();
    refresh();
  };
  $("reset").onclick = () => {
    store.samplers = {};
    save();
    showSamplers();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
}

showTheme();
wire();
for (const chat of store.chats) for (const turn of chat.turns) delete turn.open;
showSamplers();
showAll();
showRunning();
loadModels();
refresh();
setInterval(refresh, 2000);
