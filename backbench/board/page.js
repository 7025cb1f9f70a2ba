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
// A mean over unlike sets of columns orders nothing, so columns that some row lacks are left out.
const complete = rank.filter(m => m.size === measured.length);
const NO_RANK = 1e9;
const meanRank = rows.map(r => {
  const all = (complete.length ? complete : rank).map(m => m.get(r.i)).filter(Boolean);
  return all.length ? all.reduce((a, b) => a + b) / all.length : NO_RANK;
});
// By their rank over the widest set of columns; who has none there comes after, by mean rank.
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

// ---- the table

const shownFirst = columns.filter(c => c.measured || !D.numbers); // all, where nothing is measured
const PAGE = Math.max(20, Math.min(100, Math.floor(4000 / columns.filter(c => c.measured).length)));
const MORE = 500; // rows that a click adds
const MINOR = /_AP[sml]$/;
const state = {
  sort: null, // a column's place, or "name"; null is the page's own order
  up: false,
  filter: "",
  tasks: new Set(shownFirst.map(c => c.task)),
  published: true,
  only: !D.numbers, // columns that nobody measured
  every: !columns.some(c => c.measured && c.main), // all metrics, or each setting's first
  dataset: "",
  protocol: "",
  minor: false, // AP by size
  limit: PAGE,
};

function isShown(c) {
  if (!state.tasks.has(c.task)) return false;
  if (!state.every && c.measured && !c.main) return false;
  if (state.dataset && datasetName(c) !== state.dataset) return false;
  if (state.protocol && protocolName(c) !== state.protocol) return false;
  if (!state.minor && MINOR.test(c.metric)) return false;
  return c.measured > 0 || (state.published && state.only);
}

function sorted(list) {
  const way = state.up ? 1 : -1, byLabel = (a, b, how) => a.label.localeCompare(b.label, ...how);
  if (state.sort == null) return [...list].sort((a, b) => order[a.i] - order[b.i]);
  if (state.sort === "name") {
    return [...list].sort((a, b) => way * byLabel(a, b, ["en", {numeric: true}]));
  }
  // What has no value comes last, whichever way the others go.
  return list
    .map(r => [valueAt(state.sort, r.i), r])
    .sort(([a, r], [b, q]) => (a == null) - (b == null) || way * (a - b) || byLabel(r, q, []))
    .map(([, r]) => r);
}

const SAID = {
  best: "; best by a paired test",
  tied: "; not told apart from the best",
  untested: "; highest, not tested",
};

function number(k, r) {
  const x = cell[k].get(r.i);
  if (!x) return "";
  const where = `tabindex="-1" data-c="${k}" data-r="${r.i}"`;
  if (x.value == null) return `<button class="v" ${where} title="undefined"><b>–</b></button>`;
  const half = x.low == null ? "" : `<small>±${num((x.high - x.low) / 2)}</small>`;
  const interval = x.low == null ? "" : `, interval ${num(x.low, 2)} to ${num(x.high, 2)}`;
  const words = `${r.label}, ${columnLabel(columns[k])}`;
  const label = `${esc(words)}: ${num(x.value, 2)}${interval}${SAID[x.mark] || ""}`;
  return `<button class="v ${x.mark}" ${where} aria-label="${label}">` +
    `<b>${num(x.value)}</b>${half}${r.published ? "" : track(x, range[k])}</button>`;
}

// The bar under a number: its interval and its value within its column's range.
function track(x, [a, b]) {
  const at = v => Math.max(0, Math.min(100, 100 * (v - a) / (b - a))).toFixed(1);
  let bar = "";
  if (x.low != null) {
    const wide = (at(x.high) - at(x.low)).toFixed(1);
    bar = `<i style="left:${at(x.low)}%;width:${wide}%"></i>`;
  }
  return `<span class="t">${bar}<u style="left:${at(x.value)}%"></u></span>`;
}

function line(r, shown) {
  const paper = r.published ? /\(([^()]*)\)$/.exec(r.name)?.[1] : null;
  const method = r.published || r.method === r.name ? null : r.method;
  const epochs = r.epochs == null ? null : r.epochs + " ep";
  const labs = r.labs.length ? "by " + r.labs.join(", ") : null;
  const about = [paper, method, r.arch, epochs, r.cost, labs].filter(Boolean).join(" · ");
  const dot = r.published ? "" : `<span class="dot" style="--c:${colour(r.i)}"></span>`;
  const name = `${dot}${esc(r.published ? r.method : r.label)}<small>${esc(about)}</small>`;
  const numbers = shown.map((k, n) => `<td class="${edge(shown, n)}">${number(k, r)}</td>`);
  return `<tr><th scope="row" class="first" title="${esc([r.checkpoint, r.hardware].filter(Boolean).join("\n"))}">${name}</th>` +
    numbers.join("") + "</tr>";
}

// Columns that share a heading stand together; `edge` is the line before a new one.
const SETTING = ["task", "dataset", "protocol", "engine", "split"];
const same = (a, b, fields) => fields.every(field => a[field] === b[field]);
function edge(shown, n) {
  const a = columns[shown[n]], b = n ? columns[shown[n - 1]] : null;
  if (!b || a.task !== b.task) return "g d";
  return same(a, b, SETTING) ? "" : "d";
}
function groups(shown, fields) {
  const out = [];
  for (const k of shown) {
    const last = out.at(-1);
    if (last && same(columns[last[0]], columns[k], fields)) last.push(k);
    else out.push([k]);
  }
  return out;
}

const aria = k => state.sort === k ? `aria-sort="${state.up ? "ascending" : "descending"}"` : "";
function heading(shown) {
  const tasks = groups(shown, ["task"]).map(g =>
    `<th class="g" colspan="${g.length}">${esc(taskName(columns[g[0]].task))}</th>`);
  const settings = groups(shown, SETTING).map(g => {
    const c = columns[g[0]];
    const protocol =
      `<span class="soft protocol" title="${esc(protocolName(c))}">${esc(protocolName(c))}</span>`;
    return `<th class="${edge(shown, shown.indexOf(g[0]))}" colspan="${g.length}">` +
      `${esc(datasetName(c))}<br>${protocol}</th>`;
  });
  const metrics = shown.map((k, n) => {
    const name = esc(metricName(columns[k].metric)), title = esc(columns[k].name);
    return `<th scope="col" class="${edge(shown, n)}" ${aria(k)}>` +
      `<button class="sort" data-k="${k}" title="${title}">${name}</button></th>`;
  });
  return `<thead><tr><th class="first" rowspan="2"></th>${tasks.join("")}</tr>` +
    `<tr>${settings.join("")}</tr>` +
    `<tr><th class="first" scope="col" ${aria("name")}>` +
    `<button class="sort" data-k="name">Checkpoint</button></th>${metrics.join("")}</tr></thead>`;
}

function matches(r) {
  return !state.filter || state.filter.split(/\s+/).every(word => r.text.includes(word));
}

function draw() {
  const shown = places.filter(k => isShown(columns[k]));
  const mine = sorted(measured.filter(matches));
  const isPrinted = r => r.published && matches(r) && shown.some(k => cell[k].has(r.i));
  const theirs = state.published ? sorted(rows.filter(isPrinted)) : [];
  const lines = list => list.slice(0, state.limit).map(r => line(r, shown)).join("");
  let body = lines(mine);
  if (theirs.length) {
    body += `<tr class="split"><th class="first" scope="rowgroup">Published</th>` +
      `<td colspan="${shown.length || 1}">printed in the papers, not measured here</td></tr>` +
      lines(theirs);
  }
  if (!mine.length && !theirs.length) {
    const across = shown.length + 1;
    body += `<tr class="split"><td colspan="${across}">No checkpoint matches.</td></tr>`;
  }
  $("board").innerHTML = `${heading(shown)}<tbody>${body}</tbody>`;
  const first = $("board").querySelector(".v");
  if (first) first.tabIndex = 0;
  const beyond = list => Math.max(0, list.length - state.limit), left = beyond(mine) + beyond(theirs);
  const text = `Show ${Math.min(left, MORE)} more of ${left}`;
  $("more").innerHTML = left ? `<button class="plain" id="show-more">${text}</button>` : "";
  if (left) $("show-more").onclick = () => { state.limit += MORE; draw(); };
  sideways();
}

function sortBy(k) {
  state.up = state.sort === k ? !state.up : k === "name";
  state.sort = k;
  draw();
  $("board").querySelector(`.sort[data-k="${k}"]`)?.focus({preventScroll: true});
}

// One tab stop for all numbers; arrows move between them, over empty fields and the split.
const STEPS = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};
function neighbour(v, [down, right]) {
  let td = v.parentElement, tr = td.parentElement;
  const at = td.cellIndex;
  for (;;) {
    if (down) {
      tr = down > 0 ? tr.nextElementSibling : tr.previousElementSibling;
      if (!tr) return null;
      if (tr.className === "split") continue;
      td = tr.cells[Math.min(at, tr.cells.length - 1)];
    } else {
      td = right > 0 ? td.nextElementSibling : td.previousElementSibling;
      if (!td || td.tagName === "TH") return null;
    }
    const found = td.querySelector(".v");
    if (found) return found;
  }
}

function listenToTable() {
  $("board").addEventListener("click", e => {
    const heading = e.target.closest(".sort"), v = e.target.closest(".v");
    if (heading) sortBy(heading.dataset.k === "name" ? "name" : +heading.dataset.k);
    if (v) detail(+v.dataset.c, +v.dataset.r);
  });
  $("board").addEventListener("keydown", e => {
    const step = STEPS[e.key], v = e.target.closest(".v");
    const next = step && v ? neighbour(v, step) : null;
    if (!next) return;
    e.preventDefault();
    v.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    next.scrollIntoView({block: "nearest", inline: "nearest"});
  });
  $("filter").addEventListener("input", e => {
    state.filter = e.target.value.trim().toLowerCase();
    state.limit = PAGE;
    draw();
  });
  document.addEventListener("keydown", e => {
    if (e.key !== "/" || /INPUT|SELECT|TEXTAREA/.test(document.activeElement.tagName)) return;
    e.preventDefault();
    $("filters").open = true;
    $("filter").focus();
  });
}

// What of the table lies beyond the right edge.
function sideways() {
  const frame = $("frame"), hint = $("sideways");
  const beyond = frame.scrollWidth - frame.clientWidth > 4;
  hint.hidden = !beyond;
  if (!beyond) return;
  const count = places.filter(k => isShown(columns[k])).length;
  hint.textContent = `${plural(count, "column")}; more to the right: scroll sideways →`;
}

// A list of what columns may be narrowed to, where there is a choice.
function choice(id, name, of, key) {
  const all = [...new Set(columns.filter(c => c.measured).map(of))];
  if (all.length < 2) return "";
  const list = [["", `all ${name}s`], ...all.map(x => [esc(x), cut(x, 40)])];
  return `<label>${name} <select id="${id}" data-key="${key}">${options(list, "")}</select></label>`;
}

function columnControls() {
  $("choices").innerHTML = choice("by-dataset", "dataset", datasetName, "dataset") +
    choice("by-protocol", "protocol", protocolName, "protocol");
  $("choices").querySelectorAll("select").forEach(list => list.onchange = () => {
    state[list.dataset.key] = list.value;
    draw();
  });
  if (columns.some(c => c.measured && !c.main) && columns.some(c => c.measured && c.main)) {
    const title = ` title="AP50, top-5 and the like, beside each task's main metric"`;
    $("metrics").innerHTML = button(state.every, title, "All metrics");
    $("metrics").firstChild.onclick = e => {
      state.every = !state.every;
      press(e.target, state.every);
      draw();
    };
  }
  $("filters").open = innerWidth > 640;
}

const press = (element, on) => element.setAttribute("aria-pressed", String(on));
function tableControls() {
  const tasks = [...new Set(shownFirst.map(c => c.task))];
  if (tasks.length > 1) {
    const one = t => button(true, ` data-t="${esc(t)}"`, esc(taskName(t)));
    $("tasks").innerHTML = tasks.map(one).join("");
    $("tasks").addEventListener("click", e => {
      const b = e.target.closest("button");
      if (!b) return;
      const on = !state.tasks.delete(b.dataset.t);
      if (on) state.tasks.add(b.dataset.t);
      press(b, on);
      draw();
    });
  }
  if (columns.some(c => c.measured && MINOR.test(c.metric))) {
    const title = ` title="APs, APm and APl: small, medium and large objects"`;
    $("minor").innerHTML = button(false, title, "AP by size");
    $("minor").firstChild.onclick = e => {
      state.minor = !state.minor;
      if (state.minor && !state.every) $("metrics").firstChild?.click();
      press(e.target, state.minor);
      draw();
    };
  }
  if (rows.some(r => r.published)) publishedControls();
}

function publishedControls() {
  $("sources").innerHTML =
    `${button(true, "", "Published rows")} ${button(state.only, "", "Columns nobody measured")}`;
  const [all, only] = $("sources").querySelectorAll("button");
  all.onclick = () => {
    state.published = !state.published;
    press(all, state.published);
    draw();
  };
  only.onclick = () => {
    state.only = !state.only;
    // Tasks that nobody measured have no button of their own: they come and go with this one.
    for (const c of columns.filter(c => !c.measured)) {
      const alone = !columns.some(other => other.measured && other.task === c.task);
      if (state.only) state.tasks.add(c.task);
      else if (alone) state.tasks.delete(c.task);
    }
    press(only, state.only);
    draw();
  };
}

// ---- provenance of one number

const FIRST = ["command", "chosen", "recipe", "manifest", "code", "versions", "hardware", "recorded",
  "run"];
const STANDING = {
  best: "Above every other checkpoint here by a paired test.",
  tied: "No paired test tells this value from the highest in its column.",
  untested: "Highest here, but predictions to test it with were not kept.",
};

// A text as what it was: JSON is said by how it begins, and a text cut short stays a text.
function decoded(text) {
  try {
    return /^[{[]/.test(text) ? JSON.parse(text) : text;
  } catch {
    return text;
  }
}

function block(v) {
  const isGroup = typeof v === "object" && v !== null;
  return isGroup ? `<pre>${esc(JSON.stringify(v, null, 1))}</pre>` : esc(v);
}

function described(key, about) {
  if (key === "cwd") return ""; // it stands with the command
  if (key === "command") {
    const cd = about.cwd ? `cd ${esc(about.cwd)}\n` : "";
    return `<dt>Measure it again</dt><dd><pre class="cmd">${cd}${esc(about.command)}</pre>` +
      `<button class="plain copy">Copy</button></dd>`;
  }
  let value = about[key];
  if (key === "recorded") {
    value = new Date(1000 * value).toISOString().replace("T", " ").slice(0, 19) + " UTC";
  }
  return `<dt>${esc(key.replace(/_/g, " "))}</dt><dd>${block(value)}</dd>`;
}

// One measurement behind a number. Its texts are places in the list of all texts, and so are the
// lists of keys, which most measurements share.
function part(n, several) {
  const {parts, keys, texts} = readOrigins();
  const p = record(parts, n), about = {};
  keys[p.keys].forEach((key, j) => about[texts[key]] = decoded(texts[p.texts[j]]));
  const first = FIRST.filter(key => key in about);
  const others = Object.keys(about).filter(key => !FIRST.includes(key)).sort();
  const list = [...first, ...others].map(key => described(key, about)).join("");
  const title = several ? `Seed ${p.seed}: ${num(p.value, 2)}` : "Where it comes from";
  return `<h3 style="margin:1rem 0 0;font-size:.95rem">${title}</h3>` +
    `<dl><dt>split, seed</dt><dd>${esc(texts[p.split])}, ${p.seed}</dd>${list}</dl>`;
}

function source(r, parts) {
  if (r.published) return "<p>Printed in the paper; not measured here.</p>";
  if (parts.length) return parts.map(n => part(n, parts.length > 1)).join("");
  return "<p class='soft'>Computed from the numbers of its row.</p>";
}

function detail(k, i) {
  const c = columns[k], r = rows[i], {value, low, high, mark, note, parts} = cell[k].get(i);
  let interval = "";
  if (low != null) {
    const words = `95% interval ${num(low, 2)} to ${num(high, 2)}`;
    interval = ` <span class="soft" style="font-size:1rem;font-weight:400">${words}</span>`;
  }
  const said = STANDING[mark] ? `<p>${STANDING[mark]}</p>` : "";
  const kind = r.published ? "published row" : "checkpoint";
  $("detail").innerHTML =
    `<div class="head"><div><div class="soft small">${esc(columnLabel(c))}</div>` +
    `<div id="detail-title"><strong>${esc(r.label)}</strong></div></div>` +
    `<button class="plain" id="close" autofocus>Close</button></div>` +
    `<div class="body"><div class="big">${num(value, 2)}${interval}</div>` +
    `${said}${note ? `<p class="soft">${esc(note)}</p>` : ""}` +
    `<dl><dt>column</dt><dd><code>${esc(c.name)}</code></dd>` +
    `<dt>${kind}</dt><dd><code>${esc(r.checkpoint)}</code></dd></dl>${source(r, parts)}</div>`;
  $("close").onclick = () => $("detail").close();
  $("detail").querySelectorAll(".copy").forEach(b => b.onclick = () => copy(b));
  $("detail").showModal();
}

async function copy(b) {
  const pre = b.previousElementSibling;
  try {
    await navigator.clipboard.writeText(pre.textContent);
    b.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(pre);
    b.textContent = "Selected";
  }
}

// ---- charts

const svg = (w, h, body, label) =>
  `<svg viewBox="0 0 ${w} ${h}" width="${w}" height="${h}" role="img" aria-label="${esc(label)}"` +
  ` style="max-width:none;display:block">${body}</svg>`;
const between = (v, least, most) => Math.max(least, Math.min(most, v));
const tick = v => {
  if (Math.abs(v) < 1000) return String(+v.toFixed(3));
  return (v / 1000).toFixed(Math.abs(v) % 1000 ? 1 : 0) + "k";
};

// About n round numbers from a to b: steps of 1, 2, 2.5 or 5 times a power of ten.
function ticks(a, b, n = 5) {
  const raw = (b - a) / n, magnitude = 10 ** Math.floor(Math.log10(raw)), out = [];
  const step = [1, 2, 2.5, 5, 10].find(s => s * magnitude >= raw) * magnitude;
  for (let v = Math.ceil(a / step) * step; v <= b + 1e-9; v += step) out.push(+v.toFixed(10));
  return out;
}

// Where labels of points go: beside, above or below, the first place where they cover neither
// a point nor a label; null where there is none, and the point's title says it alone.
const LETTER = 6.3, LINE = 13; // pixels of 11px text
function placed(points, texts, w, h) {
  const dots = points.map(([x, y]) => [x - 6, y - 6, x + 6, y + 6]), taken = [];
  const hits = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
  return points.map(([x, y], i) => {
    if (points.length > 60) return null;
    const wide = LETTER * texts[i].length;
    const corners = [[x + 6, y - 18], [x + 6, y + 5], [x - 6 - wide, y - 18], [x - 6 - wide, y + 5],
      [x + 9, y - 7], [x - 9 - wide, y - 7], [x - wide / 2, y - 24], [x - wide / 2, y + 11]];
    for (const [left, top] of corners) {
      const box = [left, top, left + wide, top + LINE];
      const inside = left > 0 && box[2] < w && top > 0 && box[3] < h;
      const free = !taken.some(b => hits(b, box)) && !dots.some((b, j) => j !== i && hits(b, box));
      if (inside && free) {
        taken.push(box);
        return [left, top + 10, texts[i]];
      }
    }
    return null;
  });
}

// A frame of w x h with room for axes on the left, right, top and bottom, and what lies where in it.
function frame(w, h, [left, right, top, bottom], [xa, xb], [ya, yb]) {
  const X = v => left + (w - left - right) * (v - xa) / (xb - xa);
  const Y = v => h - bottom - (h - top - bottom) * (v - ya) / (yb - ya);
  const down = v => `<line class="axis" x1="${X(v)}" x2="${X(v)}" y1="${top}" y2="${h - bottom}"/>`;
  const across = v => `<line class="axis" x1="${left}" x2="${w - right}" y1="${Y(v)}" y2="${Y(v)}"/>`;
  const under = (v, gap) =>
    `<text class="soft" x="${X(v)}" y="${h - bottom + gap}" text-anchor="middle">${tick(v)}</text>`;
  const beside = v =>
    `<text class="soft" x="${left - 7}" y="${Y(v) + 4}" text-anchor="end">${tick(v)}</text>`;
  const rulesY = () => ticks(ya, yb).map(v => across(v) + beside(v)).join("");
  return {X, Y, down, under, rulesY};
}

// -- rank over a set of columns

const RANKED = 25; // rows of that table at first
function overall() {
  if (!sets.length) return hide("overall");
  const list = sets.map((s, n) => [n, s.title]);
  $("overall-controls").innerHTML = sets.length < 2 ? ""
    : `<label>over <select id="over">${options(list, 0)}</select></label>`;
  if (sets.length > 1) $("over").onchange = () => paintOverall(RANKED);
  paintOverall(RANKED);
}

function paintOverall(limit) {
  const s = sets[+($("over")?.value ?? 0)], n = s.ranks.length;
  const right = `style="text-align:right"`;
  const lines = s.ranks.slice(0, limit).map(x => overallLine(x, n));
  const left = n - lines.length;
  $("overall-table").innerHTML =
    `<div class="frame"><table class="data"><thead><tr><th ${right}>rank</th>` +
    `<th>95% interval</th><th>Checkpoint</th><th class="hide-small" ${right}>mean of its ranks</th>` +
    `<th ${right}>should win</th><th class="hide-small" ${right}>columns</th></tr></thead>` +
    `<tbody>${lines.join("")}</tbody></table></div>` +
    (left > 0 ? `<p><button class="plain" id="all-ranks">Show ${left} more</button></p>` : "") +
    `<p class="soft small">Over ${esc(s.title)}. Intervals are ${esc(s.basis)}, for all rows ` +
    `together: nobody in bold is surely below another. Two rows are compared on the columns that ` +
    `both have; nothing is filled in. Should win: the share of comparisons with the others, by ` +
    `Bradley and Terry's model.</p>`;
  if (left > 0) $("all-ranks").onclick = () => paintOverall(n);
}

function overallLine(x, n) {
  const r = rows[x.row], W = 150;
  const X = v => n < 2 ? W / 2 : 8 + (W - 16) * (v - 1) / (n - 1);
  const words = x.low === x.high ? String(x.low) : `${x.low} to ${x.high}`;
  const strip = `<svg class="hide-small" width="${W}" height="14" aria-hidden="true">` +
    `<line class="axis" x1="8" x2="${W - 8}" y1="7" y2="7"/>` +
    `<line x1="${X(x.low)}" x2="${X(x.high)}" y1="7" y2="7"` +
    ` style="stroke:${colour(r.i)};stroke-width:4;stroke-linecap:round"/>` +
    `<circle cx="${X(x.rank)}" cy="7" r="5" style="fill:${colour(r.i)}"/></svg>`;
  const name = `<span class="dot" style="--c:${colour(r.i)}"></span>${esc(r.label)}`;
  return `<tr><td class="n">${x.rank}</td><td style="white-space:nowrap">${strip} ${words}</td>` +
    `<td>${x.group === 1 ? `<strong>${name}</strong>` : name}</td>` +
    `<td class="n hide-small">${num(x.average, 2)}</td><td class="n">${num(x.win_rate, 0)}%</td>` +
    `<td class="n hide-small">${x.columns}</td></tr>`;
}

// -- rank of each checkpoint in each main column

function ranks() {
  if (!main.length || measured.length < 2) return hide("ranks");
  const list = measured
    .filter(r => meanRank[r.i] < NO_RANK)
    .sort((a, b) => order[a.i] - order[b.i])
    .slice(0, 12);
  const n = list.length, left = 150, right = 190, top = 74, dy = 34;
  const room = Math.max(300, $("rank-chart").clientWidth - 30);
  const dx = main.length > 1 ? between((room - left - right - 40) / (main.length - 1), 92, 190) : 0;
  const w = left + 40 + dx * (main.length - 1) + right, h = top + dy * n + 10;
  const X = j => left + 40 + dx * j, Y = v => top + dy * (v - 1) + 14;
  let body = main.map((k, j) => rankAxis(columns[k], X(j), top, h - 12, dx)).join("");
  for (let v = 1; v <= n; v++) {
    body += `<text class="soft" x="12" y="${Y(v) + 4}" text-anchor="end">${v}</text>`;
  }
  const place = rank.map(m => { // row -> its place among those of the list; equals share one
    const having = list.filter(r => m.has(r.i));
    const before = r => having.filter(q => m.get(q.i) < m.get(r.i)).length;
    return new Map(having.map(r => [r.i, before(r) + 1]));
  });
  for (const r of list) {
    const points = [];
    place.forEach((m, j) => {
      if (m.has(r.i)) points.push({x: X(j), y: Y(m.get(r.i)), j});
    });
    body += rankCurve(r, points);
  }
  let note = "";
  if (measured.length > n) {
    const words = `The ${n} checkpoints with the best mean rank of ${measured.length}.`;
    note = `<p class="soft small">${words}</p>`;
  }
  $("rank-chart").innerHTML = svg(w, h, body, "Rank of each checkpoint in each task") + note;
}

function rankAxis(c, x, top, bottom, dx) {
  const most = dx / 7.4; // letters between two axes
  const words = [taskName(c.task), c.dataset, metricName(c.metric)].map((s, q) => {
    const text = s.length > most ? s.slice(0, Math.floor(most) - 1) + "…" : s;
    return `<text class="${q ? "soft" : ""}" x="${x}" y="${18 + 15 * q}" text-anchor="middle"` +
      ` style="font-size:${q ? 11 : 12}px">${esc(text)}</text>`;
  });
  return `<g><line class="axis" x1="${x}" x2="${x}" y1="${top}" y2="${bottom}"/>` +
    `${words.join("")}</g>`;
}

function rankCurve(r, points) {
  // A curve between neighbouring columns; where one is missing in between, it begins anew.
  let path = "", before = null;
  for (const p of points) {
    if (before && p.j - before.j === 1) {
      const half = (before.x + p.x) / 2;
      path += `C${half} ${before.y} ${half} ${p.y} ${p.x} ${p.y}`;
    } else {
      path += `M${p.x} ${p.y}`;
    }
    before = p;
  }
  const style = `style="fill:${colour(r.i)};font-weight:600"`, begin = points[0], last = before;
  const dots = points.map(p => {
    const k = main[p.j], m = rank[p.j];
    const words = `${esc(r.label)}: ${esc(columnLabel(columns[k]))} ${num(valueAt(k, r.i), 2)}`;
    return `<circle cx="${p.x}" cy="${p.y}" r="5" style="fill:${colour(r.i)}">` +
      `<title>${words}, rank ${m.get(r.i)} of ${m.size}</title></circle>`;
  });
  let end = "";
  if (last.j === main.length - 1 && main.length > 1) {
    end = `<text x="${last.x + 11}" y="${last.y + 4}" ${style}>${esc(cut(r.label, 24))}</text>`;
  }
  return `<text x="${begin.x - 12}" y="${begin.y + 4}" text-anchor="end" ${style}>` +
    `${esc(cut(r.label, 16))}</text>` +
    `<g class="s" tabindex="-1"><path class="line" d="${path}" style="stroke:${colour(r.i)}"/>` +
    `${dots.join("")}${end}</g>`;
}

// -- one column against another

function transfer() {
  const able = places.filter(k => columns[k].measured > 2);
  if (able.length < 2) return hide("transfer");
  const first = test => able.find(k => test(columns[k], k));
  const isImagenet = c => c.dataset === "imagenet" && c.metric === "top1" && c.task === "linear";
  const x0 = first(isImagenet) ?? first(c => c.task === "linear") ?? able[0];
  const isOther = c => c.task !== columns[x0].task && MAIN.test(c.metric);
  const y0 = first(isOther) ?? first((c, k) => k !== x0);
  const list = able.map(k => [k, columnLabel(columns[k])]);
  $("transfer-controls").innerHTML =
    `<label>across <select id="tx">${options(list, x0)}</select></label>` +
    `<label>up <select id="ty">${options(list, y0)}</select></label>`;
  $("tx").onchange = $("ty").onchange = paintTransfer;
  paintTransfer();
}
const paintTransfer = () => scatter(+$("tx").value, +$("ty").value);

function scatter(kx, ky) {
  const points = rows
    .filter(r => valueAt(kx, r.i) != null && valueAt(ky, r.i) != null)
    .map(r => ({r, x: cell[kx].get(r.i), y: cell[ky].get(r.i)}));
  if (!points.length) {
    $("transfer-chart").innerHTML = "<p class='soft'>No checkpoint has both numbers.</p>";
    return;
  }
  const w = between($("transfer-chart").clientWidth - 26, 300, 900), h = Math.min(430, w * .8);
  const L = 52, R = 60, T = 14, B = 44;
  const xs = extent(points.map(p => p.x)), ys = extent(points.map(p => p.y));
  const {X, Y, down, under, rulesY} = frame(w, h, [L, R, T, B], xs, ys);
  let body = ticks(...xs).map(v => down(v) + under(v, 16)).join("") + rulesY();
  body += `<text class="soft" x="${(L + w - R) / 2}" y="${h - 6}" text-anchor="middle">` +
    `${esc(shortLabel(columns[kx]))}</text>`;
  const at = points.map(p => [X(p.x.value), Y(p.y.value)]);
  const labels = placed(at, points.map(p => cut(p.r.label, 22)), w, h - B);
  points.forEach((p, i) => body += scatterPoint(p, X, Y, labels[i]));
  const up = `<span class="soft">Upwards: ${esc(shortLabel(columns[ky]))}.</span>`;
  $("transfer-chart").innerHTML = `<p class="small">${correlation(points)} ${up}</p>` +
    svg(w, h, body, "Scatter of two tasks");
}

// From the lowest to the highest of numbers with their intervals, and a little room on either side.
function extent(numbers) {
  const ends = numbers.flatMap(x => [x.low ?? x.value, x.high ?? x.value]);
  const a = Math.min(...ends), b = Math.max(...ends), room = (b - a || 2) * .06;
  return [a - room, b + room];
}

function scatterPoint({r, x, y}, X, Y, place) {
  const c = r.published ? "var(--soft)" : colour(r.i), px = X(x.value), py = Y(y.value);
  const bar = (x1, x2, y1, y2) =>
    `<line x1="${x1}" x2="${x2}" y1="${y1}" y2="${y2}" style="stroke:${c};opacity:.5"/>`;
  const bars = (x.low == null ? "" : bar(X(x.low), X(x.high), py, py)) +
    (y.low == null ? "" : bar(px, px, Y(y.low), Y(y.high)));
  const style = r.published ? `fill:none;stroke:${c}` : `fill:${c}`;
  const title = `${esc(r.label)}: ${num(x.value, 2)}, ${num(y.value, 2)}`;
  let label = "";
  if (place) {
    const [left, top, text] = place;
    label = `<text class="name" x="${left}" y="${top}" style="fill:${c};font-size:11px">` +
      `${esc(text)}</text>`;
  }
  return `<g class="s">${bars}<circle cx="${px}" cy="${py}" r="5" style="${style}">` +
    `<title>${title}</title></circle>${label}</g>`;
}

const mean = v => v.reduce((a, b) => a + b, 0) / v.length;
function pearson(x, y) {
  const mx = mean(x), my = mean(y);
  let xy = 0, xx = 0, yy = 0;
  x.forEach((v, i) => {
    xy += (v - mx) * (y[i] - my);
    xx += (v - mx) ** 2;
    yy += (y[i] - my) ** 2;
  });
  return xy / Math.sqrt(xx * yy);
}
function rankOf(values) { // equal values share their mean rank
  const list = values.map((v, i) => [v, i]).sort((a, b) => a[0] - b[0]), out = [];
  for (let from = 0, to; from < list.length; from = to) {
    to = from;
    while (to < list.length && list[to][0] === list[from][0]) to++;
    for (let k = from; k < to; k++) out[list[k][1]] = (from + to - 1) / 2;
  }
  return out;
}

function correlation(points) {
  const own = points.filter(p => !p.r.published), n = own.length;
  if (n < 3) return "Fewer than three measured checkpoints have both.";
  const x = own.map(p => p.x.value), y = own.map(p => p.y.value);
  const r = pearson(x, y), rho = pearson(rankOf(x), rankOf(y));
  let interval = "";
  if (n > 3 && Math.abs(r) < 1) { // Fisher's z: atanh(r) is nearly normal, with variance 1 / (n - 3)
    const z = Math.atanh(r), e = 1.96 / Math.sqrt(n - 3);
    const low = Math.tanh(z - e).toFixed(2), high = Math.tanh(z + e).toFixed(2);
    interval = ` (95% interval ${low} to ${high})`;
  }
  const few = n < 8 ? " With so few, read it as a picture, not as a law." : "";
  return `Pearson r = ${r.toFixed(2)}${interval}, Spearman ρ = ${rho.toFixed(2)}, ` +
    `over ${n} measured checkpoints.${few}`;
}

// -- one checkpoint against another

function compare() {
  if (measured.length < 2) return hide("compare");
  const list = measured.map(r => [r.i, r.label]);
  const ends = [...measured].sort((a, b) => order[a.i] - order[b.i]);
  const select = (id, name, chosen) =>
    `<select id="${id}" aria-label="${name} checkpoint">${options(list, chosen)}</select>`;
  $("compare-controls").innerHTML =
    `${select("ca", "First", ends[0].i)}<span class="soft">minus</span>` +
    `${select("cb", "Second", ends.at(-1).i)}<button class="plain" id="swap">Swap</button>`;
  const paint = () => difference(+$("ca").value, +$("cb").value);
  $("ca").onchange = $("cb").onchange = paint;
  $("swap").onclick = () => {
    [$("ca").value, $("cb").value] = [$("cb").value, $("ca").value];
    paint();
  };
  paint();
}

// Row a minus row b in column k: tested where predictions were kept, else the plain difference.
function differenceIn(k, a, b) {
  const va = valueAt(k, a), vb = valueAt(k, b);
  const p = pairs.get(pairKey(k, Math.min(a, b), Math.max(a, b)));
  if (!p) return {k, va, vb, d: va - vb, low: null};
  const both = {k, va, vb, p: p.p, real: p.real, paired: p.paired, n: p.n};
  return a < b
    ? {...both, d: p.value, low: p.low, high: p.high}
    : {...both, d: -p.value, low: -p.high, high: -p.low};
}

function difference(a, b) {
  const both = places.filter(k => valueAt(k, a) != null && valueAt(k, b) != null);
  if (a === b || !both.length) {
    const why = a === b ? "Choose two checkpoints." : "They have no number in common.";
    $("compare-table").innerHTML = `<p class="soft">${why}</p>`;
    return;
  }
  const list = both.map(k => differenceIn(k, a, b));
  const ends = list.flatMap(x => [Math.abs(x.low ?? x.d), Math.abs(x.high ?? x.d)]);
  const far = Math.max(1, ...ends.filter(Number.isFinite));
  const right = `style="text-align:right"`;
  $("compare-table").innerHTML =
    `<div class="frame"><table class="data"><thead><tr><th>Column</th>` +
    `<th class="hide-small" ${right}>${esc(rows[a].label)}</th>` +
    `<th class="hide-small" ${right}>${esc(rows[b].label)}</th>` +
    `<th ${right}>difference, 95% interval</th><th class="hide-small"></th><th>verdict</th>` +
    `<th class="hide-small">paired over</th></tr></thead><tbody>` +
    list.map(x => differenceLine(x, rows[x.d > 0 ? a : b], far)).join("") +
    `</tbody></table></div>` +
    `<p class="soft small">Tested on the predictions that both runs kept, image by image (over draws ` +
    `and images for few labels and several seeds, by resamples for detection). A difference is called better ` +
    `only when the test gives p &lt; 0.05 and its interval leaves out 0. Many columns are looked ` +
    `at: one in twenty of equal pairs may still be called.</p>`;
}

function differenceLine(x, better, far) {
  const c = columns[x.k], tested = x.low != null;
  const small = (size, text) => `<div class="soft" style="font-size:${size}rem">${text}</div>`;
  let interval = "", p = "", verdict = `<span class="soft">not tested</span>`;
  if (tested) {
    interval = small(".8", `${num(x.low, 2)} to ${num(x.high, 2)}`);
    verdict = x.real
      ? `<span class="real ${x.d > 0 ? "pos" : "neg"}">${esc(better.label)} is better</span>`
      : `<span class="soft">within noise</span>`;
  }
  if (x.p != null) p = small(".76", `p ${x.p < .001 ? "< 0.001" : "= " + x.p.toFixed(3)}`);
  return `<tr><td>${esc(shortLabel(c))}${small(".76", esc(protocolName(c)))}</td>` +
    `<td class="n hide-small">${num(x.va, 2)}</td><td class="n hide-small">${num(x.vb, 2)}</td>` +
    `<td class="n">${x.d > 0 ? "+" : ""}${num(x.d, 2)}${interval}</td>` +
    `<td class="hide-small">${strip(x, far)}</td><td>${verdict}${p}</td>` +
    `<td class="soft hide-small">${tested ? `${x.n} ${esc(x.paired)}` : ""}</td></tr>`;
}

// The interval of a difference around 0, as a line and a dot.
function strip(x, far) {
  const W = 220, X = v => W / 2 + (W / 2 - 6) * between(v / far, -1, 1);
  let c = "var(--soft)";
  if (x.real) c = x.d > 0 ? "var(--best)" : "var(--bad)";
  let bar = "";
  if (x.low != null) {
    bar = `<line x1="${X(x.low)}" x2="${X(x.high)}" y1="9" y2="9"` +
      ` style="stroke:${c};stroke-width:3"/>`;
  }
  return `<svg width="${W}" height="18" viewBox="0 0 ${W} 18" aria-hidden="true">` +
    `<line class="axis" x1="${W / 2}" x2="${W / 2}" y1="0" y2="18"/>${bar}` +
    `<circle cx="${X(x.d)}" cy="9" r="4" style="fill:${c}"/></svg>`;
}

// -- pretraining

const isNumber = v => v != null && isFinite(v);
function curves() {
  if (!D.curves.length) return hide("curves");
  const names = [...new Set(D.curves.flatMap(c => Object.keys(c.y)))];
  const first = names.includes("loss") ? "loss" : names[0];
  names.sort((a, b) => (b === first) - (a === first) || a.localeCompare(b));
  $("curve-controls").innerHTML =
    `<label>show <select id="cm">${options(names.map(n => [n, n]), first)}</select></label>`;
  $("cm").onchange = paintCurves;
  paintCurves();
}

const curvesOff = new Set(D.curves.map((_, i) => i).slice(12));
const curveColour = (c, i) => colour(c.row ?? i);
function paintCurves() {
  const metric = $("cm").value;
  const list = D.curves.map((c, i) => [c, i]).filter(([c]) => c.y[metric]);
  const on = list.filter(([, i]) => !curvesOff.has(i));
  const w = between($("curve-chart").clientWidth - 26, 300, 1200), h = Math.min(380, w * .75);
  const legend = list.map(([c, i]) =>
    `<button aria-pressed="${!curvesOff.has(i)}" data-i="${i}">` +
    `<span class="dot" style="--c:${curveColour(c, i)}"></span>${esc(c.name)}</button>`);
  $("curve-chart").innerHTML =
    svg(w, h, curveLines(on, metric, w, h), "Pretraining curves: " + metric) +
    `<div class="legend">${legend.join("")}</div>` +
    `<p class="soft small">Losses of different methods have different scales: compare shapes, not ` +
    `heights. A name switches its curve off.</p>`;
  $("curve-chart").querySelectorAll(".legend button").forEach(b => b.onclick = () => {
    const i = +b.dataset.i;
    if (!curvesOff.delete(i)) curvesOff.add(i);
    paintCurves();
    $("curve-chart").querySelector(`.legend button[data-i="${i}"]`).focus();
  });
}

function curveLines(on, metric, w, h) {
  const xs = on.flatMap(([c]) => c.x), ys = on.flatMap(([c]) => c.y[metric]).filter(isNumber);
  if (!ys.length) return "";
  const L = 56, R = 12, T = 12, B = 38;
  const xb = Math.max(...xs) || 1, ya = Math.min(...ys), yb = Math.max(...ys);
  const room = (yb - ya || 1) * .05;
  const {X, Y, under, rulesY} =
    frame(w, h, [L, R, T, B], [0, xb], [ya - room, yb + room]);
  let body = ticks(0, xb).map(v => under(v, 17)).join("") + rulesY() +
    `<text class="soft" x="${(L + w) / 2}" y="${h - 4}" text-anchor="middle">step</text>`;
  for (const [c, i] of on) {
    for (const m of c.marks) {
      body += `<line class="mark" x1="${X(m.x)}" x2="${X(m.x)}" y1="${T}" y2="${h - B}"` +
        ` style="stroke:${curveColour(c, i)};stroke-dasharray:4 3"/>` +
        `<text x="${X(m.x) + 5}" y="${T + 11}" style="fill:${curveColour(c, i)};font-size:11px">` +
        `${esc(c.name)}: ${esc(m.text)}</text>`;
    }
    let pen = "M", path = ""; // M begins anew after a gap, L goes on
    c.x.forEach((x, j) => {
      const y = c.y[metric][j], there = isNumber(y);
      if (there) path += `${pen}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`;
      pen = there ? "L" : "M";
    });
    body += `<g class="s"><path class="line" d="${path}" style="stroke:${curveColour(c, i)}">` +
      `<title>${esc(c.name)}</title></path></g>`;
  }
  return body;
}

// ---- figures, pictures, verdicts

function pictures() {
  if (!D.pictures.length) return hide("detections");
  $("pictures").innerHTML = D.pictures.map(p =>
    `<figure><img alt="${esc(p.alt)}" src="${p.src}" width="${p.width}" height="${p.height}"` +
    ` loading="lazy"><figcaption>${esc(p.title)}: ground truth left, detected right<div class="soft small">${esc(p.note)}</div></figcaption></figure>`,
  ).join("");
}

function figures() {
  if (!D.figures.length) return hide("figures");
  $("figure-list").innerHTML = D.figures.map(p =>
    `<figure><a href="#figures" data-full>` +
    `<img alt="${esc(p.title)}" src="${p.src}" width="${p.width}" height="${p.height}"` +
    ` loading="lazy"></a>` +
    `<figcaption>${esc(p.title)}</figcaption></figure>`,
  ).join("");
  $("figure-list").querySelectorAll("[data-full]").forEach(a => a.onclick = e => {
    e.preventDefault();
    const style = a.closest("figure").style;
    style.gridColumn = style.gridColumn ? "" : "1 / -1";
  });
}

function reproduction() {
  if (!D.judged.length) return hide("reproduction");
  const heads = ["measured", "published", "tolerance"]
    .map(name => `<th style="text-align:right">${name}</th>`);
  const lines = D.judged.map(j => {
    const small = (size, text) => `<div class="soft" style="font-size:${size}rem">${text}</div>`;
    const interval = j.low == null ? "" : small(".8", `${num(j.low, 2)} to ${num(j.high, 2)}`);
    const tone = j.verdict === "within" ? "pos" : "neg";
    const others = j.others.map(other => small(".76", esc(other))).join("");
    return `<tr><td>${esc(j.name)}</td><td>${esc(j.column)}${small(".76", esc(j.key))}</td>` +
      `<td class="n">${num(j.measured, 2)}${interval}</td><td class="n">${num(j.published, 2)}</td>` +
      `<td class="n">±${j.tolerance}</td><td><span class="tag ${tone}">${esc(j.said)}</span>` +
      `${others}</td>` +
      `<td class="soft">${esc(j.hardware)}</td></tr>`;
  });
  $("judged").innerHTML =
    `<div class="frame"><table class="data"><thead><tr><th>Checkpoint</th><th>Column</th>` +
    `${heads.join("")}<th>verdict</th><th>hardware</th></tr></thead>` +
    `<tbody>${lines.join("")}</tbody></table></div>`;
}

// ---- words around them

const SECTIONS = {
  table: "Leaderboard",
  overall: "Ranks",
  ranks: "Rank per task",
  transfer: "Task against task",
  compare: "Compare two",
  curves: "Pretraining",
  figures: "Figures",
  detections: "Detections",
  reproduction: "Reproduction",
  notes: "How to read",
};
const KEY = {
  best: "<strong class='pos'>Bold green</strong>: above every other checkpoint by a paired test. ",
  tied: "<span style='text-decoration:underline dotted 2px var(--best);text-underline-offset:3px'>" +
    "Dotted</span>: no test tells it from the best. ",
  untested: "<em>Italic</em>: highest, but not testable. ",
};

function words() {
  const n = measured.length, marks = new Set(D.cells.flatMap(table => table.mark));
  const published = rows.length > n ? `, with ${rows.length - n} published rows beside them` : "";
  const counts = [
    plural(n, "checkpoint"),
    plural(D.numbers, "measured number"),
    plural(columns.filter(c => c.measured).length, "column"),
  ];
  $("answer").textContent = D.answer;
  $("summary").textContent =
    `${counts.join(", ")}${published}. Made ${D.made} by backbench ${D.version}.`;
  const key = Object.keys(KEY).filter(mark => marks.has(mark)).map(mark => KEY[mark]).join("");
  $("key").innerHTML =
    `Percent; ± is half the 95% interval, the bar under a number shows it within its column's ` +
    `range. ${key}Rows are in the order of their rank over all columns, see below; ` +
    `click a heading to sort by it, a number for where it comes from and the command that measures ` +
    `it again. Arrow keys move between numbers, / filters.`;
  if (D.problems.length) {
    const list = D.problems.slice(0, 200).map(p => `<li>${esc(p)}</li>`).join("");
    $("warnings").innerHTML =
      `<details class="warn"><summary>${plural(D.problems.length, "line")} in the results need ` +
      `attention</summary><ul class="small">${list}</ul></details>`;
  }
  $("reading").innerHTML =
    `<p>A row is one set of weights, named by its digest: the same weights under two names are one ` +
    `row. A column is one way to measure: numbers made by another protocol, detection engine or ` +
    `split stand in another column, so every column may be read from top to bottom.</p>` +
    `<p>An average stands only where all twelve of its datasets were measured. A dash is undefined ` +
    `(an average precision without ground truth), an empty field was not run.</p>` +
    `<p>Published rows are copied from the papers' tables. They are never ranked, averaged or ` +
    `tested together with measured ones.</p>`;
  $("nav").innerHTML =
    Object.entries(SECTIONS).map(([id, text]) => `<a href="#${id}">${text}</a>`).join("") +
    `<button class="plain" id="theme" aria-label="Switch between light and dark">` +
    `Light / dark</button>`;
  $("theme").onclick = () => {
    const chosen = document.documentElement.dataset.theme;
    const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  };
}

// ---- the page

listenToTable();
tableControls();
columnControls();
$("detail").addEventListener("click", e => { if (e.target === $("detail")) $("detail").close(); });
words();
draw();
pictures();
figures();
reproduction();

// Charts of a large board are drawn when they come into view, or before printing.
const later = new Map([
  ["overall", overall], ["ranks", ranks], ["transfer", transfer], ["compare", compare], ["curves", curves],
]);
function paintSection(id) {
  const paint = later.get(id);
  later.delete(id);
  paint?.();
}
const paintAll = () => [...later.keys()].forEach(paintSection);
if (measured.length * columns.length > 5000) {
  const seen = new IntersectionObserver(list => list.forEach(e => {
    if (!e.isIntersecting) return;
    seen.unobserve(e.target);
    paintSection(e.target.id);
  }), {rootMargin: "300px"});
  [...later.keys()].forEach(id => seen.observe($(id)));
  addEventListener("beforeprint", paintAll);
  // What is painted on the way moves what is below it: a link goes to where its section stays.
  $("nav").addEventListener("click", e => e.target.closest("a") && paintAll());
} else {
  paintAll();
}

const isDrawn = id => !later.has(id) && !$(id).hidden;
let pause;
addEventListener("resize", () => {
  clearTimeout(pause);
  pause = setTimeout(() => {
    sideways();
    if (isDrawn("ranks")) ranks();
    if (isDrawn("transfer")) paintTransfer();
    if (isDrawn("curves")) paintCurves();
  }, 150);
});
