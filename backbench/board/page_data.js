"use strict";
// The leaderboard's page: it draws everything from the two JSON blocks that page.py fills in. The
// fields of all records are those of page_records.py.
//
// `rows` are checkpoints and printed rows, `columns` ways to measure. A row is meant by its `index`
// in `rows`, a column by its place k in `columns`. cells[k].get(index) is the number of that row in
// that column; it is undefined where the row was not measured so.

const $ = id => document.getElementById(id);
const DATA = JSON.parse($("data").textContent);
let origins = null; // read when the first number is opened: it is most of the page
const readOrigins = () => origins ??= JSON.parse($("origins").textContent);

// ---- what the page holds

// A table comes as one list per field; `record` is one of its rows as an object with those fields.
function record(table, n) {
  const out = {};
  for (const field in table) out[field] = table[field][n];
  return out;
}
const records = table => (Object.values(table)[0] ?? []).map((_, n) => record(table, n));

const columns = records(DATA.columns);
const places = columns.map((_, k) => k);
const rows = records(DATA.rows).map((row, index) => {
  const searched = [row.checkpoint, row.name, row.method, row.arch, ...row.labs];
  return {...row, index, text: searched.join(" ").toLowerCase()};
});
const measured = rows.filter(row => !row.published);
const labsOfAll = [...new Set(rows.flatMap(row => row.labs))];
const cells = DATA.cells.map(table => new Map(records(table).map(cell => [cell.row, cell])));
const valueAt = (k, index) => cells[k].get(index)?.value ?? null;
const isMeasured = cell => !rows[cell.row].published && cell.value != null;

// Of each column the lowest and the highest end of the measured values' intervals.
const range = cells.map(ofColumn => {
  let least = Infinity;
  let most = -Infinity;
  for (const cell of ofColumn.values()) {
    if (!isMeasured(cell)) continue;
    least = Math.min(least, cell.low ?? cell.value);
    most = Math.max(most, cell.high ?? cell.value);
  }
  return most > least ? [least, most] : [least - 1, most + 1];
});

// Paired differences: row a minus row b in a column, where a stands before b.
const pairKey = (k, a, b) => `${k},${a},${b}`;
const pairs = new Map(records(DATA.pairs).map(pair => [pairKey(pair.column, pair.a, pair.b), pair]));

// ---- the order of the rows: mean rank over the main columns

const isMain = column => column.ranks && column.measured > 1 && column.task !== "analyze";
const main = places.filter(k => isMain(columns[k]));
// Of each main column a map from a row to its rank; equal values share the better rank.
const rank = main.map(k => {
  const list = [...cells[k].values()].filter(isMeasured).sort((a, b) => b.value - a.value);
  const out = new Map();
  list.forEach((cell, n) => {
    const before = list[n - 1];
    out.set(cell.row, n && cell.value === before.value ? out.get(before.row) : n + 1);
  });
  return out;
});
// Means over different columns cannot be compared, so columns that some row lacks are left out.
const complete = rank.filter(ofColumn => ofColumn.size === measured.length);
const NO_RANK = 1e9;
const meanRank = rows.map(row => {
  const used = complete.length ? complete : rank;
  const ranks = used.map(ofColumn => ofColumn.get(row.index)).filter(Boolean);
  return ranks.length ? ranks.reduce((a, b) => a + b) / ranks.length : NO_RANK;
});
// The widest set of columns is the first one.
const sets = DATA.sets.map(set => ({...set, ranks: records(set.ranks)}));
const placeOverAll = rows.map(() => NO_RANK);
(sets[0]?.ranks ?? []).forEach((place, n) => placeOverAll[place.row] = n);
// Row -> its place in the table: measured rows as the widest set has them; those that it has not
// follow, by mean rank.
const order = [];
[...rows]
  .sort((a, b) => a.published - b.published ||
    placeOverAll[a.index] - placeOverAll[b.index] ||
    meanRank[a.index] - meanRank[b.index] ||
    a.index - b.index)
  .forEach((row, n) => order[row.index] = n);
const inOrder = list => [...list].sort((a, b) => order[a.index] - order[b.index]);

// ---- words and colours

const COLORS = 10;
const colour = index => `var(--c${index % COLORS})`;
const esc = text => String(text).replace(/[&<>"']/g, c => "&#" + c.charCodeAt(0) + ";");
// At most four significant digits: 71.25, 100.0, 1234, and 12350 for 12345.6.
function num(value, decimals = 1) {
  if (value == null) return "–";
  const rounded = Number(value.toPrecision(4));
  const whole = String(Math.trunc(Math.abs(rounded))).length;
  return rounded.toFixed(between(4 - whole, 0, decimals));
}
const between = (value, least, most) => Math.max(least, Math.min(most, value));
const cut = (text, most) => text.length > most ? text.slice(0, most - 1) + "…" : text;
const plural = (count, word) =>
  `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const taskName = task => DATA.tasks[task] || task;
const datasetName = column => column.dataset + (column.split ? ":" + column.split : "");
const protocolName = column => column.protocol + (column.engine ? " + " + column.engine : "");
// The protocol tells columns apart that have one task, dataset and metric.
const hasNamesake = column => columns.some(other =>
  other !== column && same(other, column, ["task", "dataset", "metric"]));
const same = (a, b, fields) => fields.every(field => a[field] === b[field]);
const shortLabel = column =>
  [taskName(column.task), column.dataset, column.heading,
    hasNamesake(column) ? protocolName(column) : ""].filter(Boolean).join(" · ");
const columnLabel = column =>
  `${taskName(column.task)} · ${datasetName(column)} · ${column.heading} · ${protocolName(column)}`;
// What stands between backticks is a command.
const withCommands = text => text
  .split("`")
  .map((part, n) => n % 2 ? `<code>${esc(part)}</code>` : esc(part))
  .join("");
const dot = (color, words) => `<span class="dot" style="--c:${color}"></span>${esc(words)}`;
const small = (size, text) => `<div class="soft" style="font-size:${size}rem">${text}</div>`;
const fromTo = (low, high) => `${num(low, 2)} to ${num(high, 2)}`;
const options = (list, chosen) => list
  .map(([value, text]) =>
    `<option value="${value}"${value === chosen ? " selected" : ""}>${esc(text)}</option>`)
  .join("");
const button = (pressed, attributes, text) =>
  `<button class="plain" aria-pressed="${pressed}"${attributes}>${text}</button>`;

function hide(id) {
  $(id).hidden = true;
  $("nav").querySelector(`a[href="#${id}"]`)?.remove();
}

// A table with a line for each record. Each kind of column is one entry:
//   heading    its name, as HTML
//   cell       record -> what stands in its line, as HTML
//   number     it is set to the right
//   wide       it is left out on a narrow screen
//   soft       it is set in the pale colour
//   style      more of its cells' style
//   explained  sentences for the note below the table, as HTML (`explanations`)
function dataTable(kinds, list) {
  const heads = kinds.map(kind => {
    const hidden = kind.wide ? ` class="hide-small"` : "";
    const right = kind.number ? ` style="text-align:right"` : "";
    return `<th${hidden}${right}>${kind.heading}</th>`;
  });
  const lines = list.map(one => {
    const fields = kinds.map(kind => {
      const names = [kind.number && "n", kind.soft && "soft", kind.wide && "hide-small"];
      const used = names.filter(Boolean).join(" ");
      const style = kind.style ? ` style="${kind.style}"` : "";
      return `<td${used && ` class="${used}"`}${style}>${kind.cell(one)}</td>`;
    });
    return `<tr>${fields.join("")}</tr>`;
  });
  return `<div class="frame"><table class="data"><thead><tr>${heads.join("")}</tr></thead>` +
    `<tbody>${lines.join("")}</tbody></table></div>`;
}
const explanations = kinds => kinds.map(kind => kind.explained).filter(Boolean).join(" ");
