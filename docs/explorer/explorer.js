// The plan explorer (docs/plan-explorer.md): plans a batch with the planner itself, compiled to WebAssembly, and shows
// the page of `flashpage plan --html` for it, next to a fixed split. Planner needs no browser: node runs it in a test.
"use strict";

const MOST_ITEMS = 200000, MOST_REQUESTS = 20000, MOST_TOKENS = 2 ** 30;

// "300,17,4096", "64x4096", or KIND:64:4096 for 64 requests of 4096 tokens on average, as `flashpage plan` reads them,
// except lognormal.
function lengths(text) {
  const refuse = () => { throw new Error(`"${text}" is not a list of lengths: 300,17,4096 or 64x4096 or zipf:64:4096`); };
  const whole = word => /^\s*\d+\s*$/.test(word) ? Number(word) : refuse();
  const [kind, ...rest] = text.split(":");
  let found = [];
  if (rest.length) {
    if (rest.length !== 2) refuse();
    const [batch, mean] = rest.map(whole);
    if (batch < 1 || mean < 1 || batch > MOST_REQUESTS) refuse();
    const indices = [...Array(batch).keys()], short = Math.max(1, Math.floor(mean / 16));
    if (kind.trim() === "one-long") found = indices.map(i => i ? short : mean * batch - short * (batch - 1));
    else if (kind.trim() === "uniform") found = indices.map(() => mean);
    else if (kind.trim() === "zipf") {
      const scale = mean * batch / indices.reduce((sum, i) => sum + 1 / (i + 1), 0);
      found = indices.map(i => Math.max(1, Math.round(scale / (i + 1))));
    } else refuse();
  } else {
    for (const part of text.split(",")) {
      const [times, length] = part.includes("x") ? part.split("x").map(whole) : [1, whole(part)];
      if (times > MOST_REQUESTS) refuse();
      for (let i = 0; i < times; ++i) found.push(length);
    }
  }
  if (found.length > MOST_REQUESTS) throw new Error(`${found.length} requests: this page plans at most ${MOST_REQUESTS}`);
  const all = found.reduce((sum, n) => sum + n, 0);
  if (all >= MOST_TOKENS) throw new Error(`${all} tokens or rows in all: this page plans fewer than ${MOST_TOKENS}`);
  return found;
}

function bytesOf(text) { return Uint8Array.from(atob(text), c => c.charCodeAt(0)); }

// Numbers and columns of a view, in the order of planner.cpp.
const NUMBERS = ["status", "num_ctas", "num_items", "num_merges", "num_partial_rows", "num_units", "pieces"];
const COLUMNS = ["first", "start", "end", "request", "kv_head", "num_units", "first_packed_row", "kv_begin", "kv_end", "piece"];

class Planner {
  static async load(module, table) {
    const imports = {
      env: { emscripten_notify_memory_growth() {} },
      wasi_snapshot_preview1: { proc_exit(code) { throw new Error(`the planner ended with ${code}: too little memory?`); } },
    };
    const { instance } = await WebAssembly.instantiate(module, imports);
    instance.exports._initialize();
    return new Planner(instance.exports, table);
  }

  constructor(exports, table) {
    this.exports = exports;
    this.table = table;
    this.place = 0;
    this.room = 0;
  }

  // Copies arrays of 32-bit numbers, or bytes, to the module's memory; returns their addresses. The first use of the
  // memory after a call must make a new array over it, because the memory may have grown.
  put(...arrays) {
    const needed = arrays.reduce((sum, array) => sum + array.byteLength + 8, 0);
    if (needed > this.room) {
      this.place = this.exports.explorer_memory(needed);
      this.room = needed;
    }
    let at = this.place;
    return arrays.map(array => {
      new Uint8Array(this.exports.memory.buffer).set(new Uint8Array(array.buffer, array.byteOffset, array.byteLength), at);
      const here = at;
      at += Math.ceil(array.byteLength / 8) * 8;
      return here;
    });
  }

  view(address) {
    const words = new Int32Array(this.exports.memory.buffer, address, NUMBERS.length + COLUMNS.length);
    const found = Object.fromEntries(NUMBERS.map((name, i) => [name, words[i]]));
    if (found.status) throw new Error(`the planner answers with status ${found.status}`);
    found.columns = {};
    COLUMNS.forEach((name, i) => {
      const type = name === "start" || name === "end" ? Float32Array : Int32Array;
      const count = name === "first" ? found.num_ctas + 1 : found.num_items;
      found.columns[name] = new type(this.exports.memory.buffer, words[NUMBERS.length + i], count).slice();
    });
    return found;
  }

  // The planner's view of a batch and that of a fixed split of it; rows null: one row for each request, as in decode.
  plan({ card, heads, head_dim, tokens, rows, pieces }) {
    const own = this.table.rows[`${card} ${heads} ${head_dim}`], [num_q_heads, num_kv_heads] = heads.split("/").map(Number);
    const q_lens = rows || tokens.map(() => 1), all = q_lens.reduce((sum, n) => sum + n, 0);
    const [contexts, q, kv] = this.put(bytesOf(own.contexts), Int32Array.from(q_lens), Int32Array.from(tokens));
    const kind = this.exports.explorer_batch(contexts, tokens.length, q, kv, num_q_heads, num_kv_heads, 1, this.table.page_size);
    const packed = Math.max(1, Math.ceil(all / Math.max(1, tokens.length)) * (num_q_heads / num_kv_heads));
    const row = own.rows[Math.min(own.rows.length - 1, Math.ceil(Math.log2(packed)))];
    const [kernel, text] = this.table.schedules[rows ? row[kind] : own.decode];
    const [schedule] = this.put(bytesOf(text));
    const values = new DataView(bytesOf(text).buffer), fields = {};
    let at = 0;
    for (const [name, type, count] of this.table.fields) {
      fields[name] = type === "f" ? values.getFloat32(at, true) : values.getInt32(at, true);
      at += 4 * count;
    }
    return { kernel, schedule: fields, planner: this.view(this.exports.explorer_plan(schedule)), fixed: this.view(this.exports.explorer_fixed(schedule, pieces)) };
  }
}

function time(ns) {
  for (const [limit, name] of [[1e3, "ns"], [1e6, "us"], [1e9, "ms"]]) if (ns < limit) return `${+(ns / limit * 1e3).toPrecision(3)} ${name}`;
  return `${+(ns / 1e9).toPrecision(3)} s`;
}

const counted = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

function loadsOf(view) {
  const { first, end } = view.columns, loads = [];
  for (let cta = 0; cta < view.num_ctas; ++cta) loads.push(first[cta + 1] > first[cta] ? end[first[cta + 1] - 1] : 0);
  return loads;
}

const longestOf = view => loadsOf(view).reduce((most, load) => Math.max(most, load), 0);

// The numbers that plan.html draws, as flashpage/plan/report/page.py makes them. `whole`: nanoseconds of the axis.
function dataOf(view, tokens, rows, group, whole) {
  const { request, start, end, first } = view.columns, loads = loadsOf(view), requests = {}, table = new Map();
  for (let cta = 0; cta < view.num_ctas; ++cta) {
    for (let i = first[cta]; i < first[cta + 1]; ++i) {
      const r = request[i];
      if (!table.has(r)) table.set(r, [r, rows ? rows[r] : 1, tokens[r], 0, new Set(), 0]);
      const row = table.get(r);
      row[3] += 1; row[4].add(cta); row[5] += end[i] - start[i];
      requests[r] = [tokens[r], rows ? rows[r] : 1];
    }
  }
  const columns = {};
  for (const [name, values] of Object.entries(view.columns)) {
    const bytes = new Uint8Array(values.buffer);
    let text = "";
    for (let i = 0; i < bytes.length; i += 4096) text += String.fromCharCode(...bytes.subarray(i, i + 4096));
    columns[name] = [values instanceof Float32Array ? "f4" : "i4", btoa(text)];
  }
  const costliest = [...table.values()].map(row => [...row.slice(0, 4), row[4].size, row[5]]).sort((a, b) => b[5] - a[5]);
  const longest = Math.max(0, ...loads), mean = loads.reduce((sum, n) => sum + n, 0) / Math.max(1, loads.length);
  return { columns, group, longest, mean, whole, requests, table: costliest.slice(0, 200) };
}

function factsOf(view) {
  const loads = loadsOf(view), longest = longestOf(view), mean = loads.reduce((sum, n) => sum + n, 0) / Math.max(1, loads.length);
  const cut = view.columns.piece.filter(n => n >= 0).length;
  return [
    [time(longest), mean ? `the longest CTA, ${(100 * (longest / mean - 1)).toFixed(1)}% above the mean of ${time(mean)}` : "no work"],
    [`${loads.filter(n => n > 0).length} of ${loads.length}`, "CTAs have work"],
    [`${cut} of ${view.num_items}`, "work items that are pieces of cut units"],
    [`${view.num_merges}`, `merges of ${view.num_partial_rows} partial rows`],
  ];
}

function pageOf(template, title, view, data, reasons) {
  const escape = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
  const facts = factsOf(view).map(([value, meaning]) => `<div><b>${escape(value)}</b><span>${escape(meaning)}</span></div>`).join("");
  const given = { title: escape(title), facts, reasons: escape(reasons), data: JSON.stringify(data).replace(/</g, "\\u003c") };
  return template.replace(/\{\{(\w+)\}\}/g, (_, name) => given[name]);
}

// ---------------------------------------------------------------- the page

// A frame as high as its page, also after a list in it was opened.
function fit(frame) {
  const page = frame.contentDocument.documentElement;
  page.style.overflow = "hidden";
  const set = () => { frame.style.height = `${page.offsetHeight + 2}px`; };
  frame.contentWindow.addEventListener("resize", set);
  new MutationObserver(set).observe(page, { subtree: true, childList: true, attributeFilter: ["open"] });
  set();
}

async function start(given) {
  const $ = id => document.getElementById(`explorer-${id}`), form = $("form");
  if (!given.wasm) { $("said").textContent = given.why; form.hidden = true; return; }
  const table = given.table, planner = await Planner.load(bytesOf(given.wasm), table);
  for (const [name, values] of [["card", table.cards], ["heads", table.heads], ["dim", table.head_dims]])
    for (const value of values) $(name).add(new Option(value, value));
  $("dim").value = 128;
  const show = () => {
    try {
      const tokens = lengths($("tokens").value), rows = $("rows").value.trim() ? lengths($("rows").value) : null;
      if (rows && rows.length !== tokens.length) throw new Error(`rows of ${rows.length} requests, but tokens of ${tokens.length}`);
      const heads = $("heads").value, group = heads.split("/").reduce((q, kv) => q / kv), card = $("card").value;
      const begin = performance.now();
      const found = planner.plan({ card, heads, head_dim: $("dim").value, tokens, rows, pieces: Number($("pieces").value) });
      const milliseconds = performance.now() - begin;
      if (Math.max(found.planner.num_items, found.fixed.num_items) > MOST_ITEMS) throw new Error("too many pieces to draw");
      const [ours, theirs] = [longestOf(found.planner), longestOf(found.fixed)], whole = Math.max(ours, theirs, 1);
      const { schedule: s, kernel } = found;
      const costs = `${time(s.ns_per_unit)} a unit, ${+s.ns_per_token.toPrecision(3)} ns a token, ${time(s.ns_per_piece)} a further piece of a cut unit`;
      const words = `kernel ${kernel} on ${card}: tile ${s.tile_q} packed rows x ${s.tile_kv} tokens, ${s.num_ctas} CTAs\ncosts: ${costs}, ${time(s.ns_per_merge)} for a merge`;
      const frames = [["planner", "The planner", found.planner], ["fixed", `A fixed split: ${counted(found.fixed.pieces, "piece")} a unit`, found.fixed]];
      for (const [id, title, view] of frames) {
        const frame = $(id);
        frame.onload = () => fit(frame);
        frame.srcdoc = pageOf(given.page, title, view, dataOf(view, tokens, rows, group, whole), words);
      }
      $("said").textContent = `Predicted: ${time(ours)} by the planner, ${time(theirs)} by a fixed split with ${counted(found.fixed.pieces, "piece")} a unit, merges not counted. Planned here in ${milliseconds.toFixed(1)} ms.`;
      form.classList.remove("wrong");
    } catch (error) {
      $("said").textContent = error.message;
      form.classList.add("wrong");
    }
  };
  form.addEventListener("submit", event => { event.preventDefault(); show(); });
  form.addEventListener("change", show);
  for (const button of form.querySelectorAll("[data-tokens]")) button.onclick = () => {
    $("tokens").value = button.dataset.tokens; $("rows").value = button.dataset.rows || ""; show();
  };
  show();
}

if (typeof module === "object") module.exports = { Planner, lengths, dataOf, longestOf };
