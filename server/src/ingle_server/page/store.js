// What the browser keeps: conversations and settings in localStorage, the key for this tab only.
"use strict";

const SAMPLERS = [
  ["temperature", "Temperature", 0, 2, 0.05],
  ["top_p", "Top P", 0, 1, 0.01],
  ["top_k", "Top K", 0, 1000, 1],
  ["min_p", "Min P", 0, 1, 0.01],
  ["typical_p", "Typical P", 0, 1, 0.01],
  ["repetition_penalty", "Repetition penalty", 0.5, 2, 0.01],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.05],
  ["presence_penalty", "Presence penalty", -2, 2, 0.05],
  ["dry_multiplier", "DRY multiplier", 0, 5, 0.05],
  ["xtc_probability", "XTC probability", 0, 1, 0.05],
  ["smoothing_factor", "Smoothing factor", 0, 10, 0.05],
  ["seed", "Seed", 0, 4294967295, 1],
  ["max_tokens", "Most tokens", 1, 131072, 1],
];
const KEPT = "ingle.v1";

const store = load();

function load() {
  const empty = { chats: [], current: null, samplers: {}, system: "", theme: "" };
  try {
    return { ...empty, ...JSON.parse(localStorage.getItem(KEPT) || "{}") };
  } catch {
    return empty;
  }
}

function save() {
  try {
    localStorage.setItem(KEPT, JSON.stringify(store));
  } catch {
    // Full or forbidden: this visit still works.
  }
}

function currentChat() {
  return store.chats.find((chat) => chat.id === store.current) || null;
}

function openChat() {
  const chat = { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "New chat", turns: [] };
  store.chats.unshift(chat);
  store.current = chat.id;
  return chat;
}

function apiKey() {
  return sessionStorage.getItem("ingle.key") || "";
}

function headers() {
  const key = apiKey();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function parseMetrics(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const [name, value] = line.split(" ");
    if (name && name[0] !== "#" && !name.includes("{")) found[name] = Number(value);
  }
  return found;
}
