"use strict";
// The leaderboard's page: draws everything from the two JSON blocks that page.py fills in.
//
// Words: `rows` are checkpoints (r, with its place r.i), `columns` ways to measure (their places are
// k); cell[k].get(i) is the number of row i in column k, or nothing where that was not run.

const $ = id => document.getElementById(id);
const D = JSON.parse($("data").textContent);
let origins = null; // read when the first number is opened: it is most of the page
const readOrigins = () => origins ??= JSON.parse($("origins").textContent);

// ---- what the page holds

// A table comes as one list per field; `record` is one of its rows as an object with those fields.
function record(table, i) {
  const out = {};
  for (const field in table) out[field] = table[field][i];
  return out;
}
const records = table => (Object.values(table)[0] ?? []).map((_, i) => record(table, i));

const columns = records(D.columns);
const rows = records(D.rows).map((row, i) => ({
  ...row,
  i,
  text: [row.checkpoint, row.name, row.method, row.arch, ...row.labs].join(" ").toLowerCase(),
}));
const measured = rows.filter(r => !r.published);
const labsOfAll = [...new Set(rows.flatMap(r => r.labs))];
const cell = D.cells.map(table => new Map(records(table).map(x => [x.row, x])));
const places = columns.map((_, k) => k);
const valueAt = (k, i) => cell[k].get(i)?.value ?? null;
const isMeasured = x => !rows[x.row].published && x.value != null;

// The measured values of each column with their intervals, from the lowest to the highest.
const range = places.map(k => {
  let a = Infinity, b = -Infinity;
  for (const x of cell[k].values()) {
    if (!isMeasured(x)) continue;
    a = Math.min(a, x.low ?? x.value);
    b = Math.max(b, x.high ?? x.value);
  }
  return b > a ? [a, b] : [a - 1, a + 1];
});

// Paired differences: row a minus row b in a column, where a stands before b.
const pairKey = (k, a, b) => `${k},${a},${b}`;
const pairs = new Map(records(D.pairs).map(p => [pairKey(p.column, p.a, p.b), p]));

// ---- the order of the rows: mean rank over the main columns

const MAIN = /^(top1|mean_per_class|average|.*_AP|AP)(_k\d+)?$/;
const isMain = c => c.measured > 1 && c.task !== "analyze" && MAIN.test(c.metric);
const main = places.filter(k => isMain(columns[k]));
const rank = main.map(k => { // row -> its rank; equal values share the better one
  const list = [...cell[k].values()].filter(isMeasured).sort((a, b) => b.value - a.value);
  const out = new Map();
  list.forEach((x, n) => {
    const before = list[n - 1];
    out.set(x.row, n && x.value === before.value ? out.get(before.row) : n + 1);
  });
  return out;
});
// Means over different columns cannot be compared, so columns that some row lacks are left out.
const complete = rank.filter(m => m.size === measured.length);
const NO_RANK = 1e9;
const meanRank = rows.map(r => {
  const all = (complete.length ? complete : rank).map(m => m.get(r.i)).filter(Boolean);
  return all.length ? all.reduce((a, b) => a + b) / all.length : NO_RANK;
});
// Rows by their rank over the widest set of columns; rows without one follow, by mean rank.
const sets = D.sets.map(s => ({...s, ranks: records(s.ranks)}));
const ranked = rows.map(() => NO_RANK);
for (const x of sets[0]?.ranks ?? []) ranked[x.row] = x.rank;
const order = []; // row -> its place in the table
[...rows]
  .sort((a, b) => a.published - b.published || ranked[a.i] - ranked[b.i] ||
    meanRank[a.i] - meanRank[b.i] || a.i - b.i)
  .forEach((r, n) => order[r.i] = n);

// ---- words and colours

const COLORS = 10;
const colour = i => `var(--c${i % COLORS})`;
const esc = s => String(s).replace(/[&<>"']/g, c => "&#" + c.charCodeAt(0) + ";");
const num = (v, n = 1) => v == null ? "–" : v.toFixed(n);
const cut = (s, most) => s.length > most ? s.slice(0, most - 1) + "…" : s;
const plural = (k, word) => `${k.toLocaleString("en")} ${word}${k === 1 ? "" : "s"}`;
const taskName = t => D.tasks[t] || t;
const metricName = m => m
  .replace(/^top(\d)/, "top-$1")
  .replace(/^mean_per_class/, "mean/class")
  .replace(/^average/, "mean of 12")
  .replace(/_/g, " ");
const datasetName = c => c.dataset + (c.split ? ":" + c.split : "");
const protocolName = c => c.protocol + (c.engine ? " + " + c.engine : "");
const shortLabel = c => `${taskName(c.task)} · ${c.dataset} · ${metricName(c.metric)}`;
const columnLabel = c =>
  `${taskName(c.task)} · ${datasetName(c)} · ${metricName(c.metric)} · ${protocolName(c)}`;
const options = (list, chosen) => list
  .map(([v, t]) => `<option value="${v}"${v === chosen ? " selected" : ""}>${esc(t)}</option>`)
  .join("");
const button = (pressed, attributes, text) =>
  `<button class="plain" aria-pressed="${pressed}"${attributes}>${text}</button>`;

function hide(id) {
  $(id).hidden = true;
  $("nav").querySelector(`a[href="#${id}"]`)?.remove();
}
