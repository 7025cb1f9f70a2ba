// ---- the table

// What the marks of page_records.py's cells mean: in the dialog of a number, for a screen reader,
// and in the key below the table.
const MARKS = {
  best: {
    detail: "Above every other checkpoint here by a paired test.",
    spoken: "best by a paired test",
    key: "<strong class='pos'>Bold green</strong>: above every other checkpoint by a paired test. ",
  },
  tied: {
    detail: "No paired test separates this value from the highest in its column.",
    spoken: "not separated from the best by a test",
    key: "<span style='text-decoration:underline dotted 2px var(--best);" +
      "text-underline-offset:3px'>Dotted</span>: no test separates it from the best. ",
  },
  untested: {
    detail: "Highest here, but not tested: predictions were not kept.",
    spoken: "highest, not tested",
    key: "<em>Italic</em>: highest, but not tested. ",
  },
  once: {
    detail: "Best of one training each: nobody knows how far a second training would move it.",
    spoken: "best of one training each",
    key: "<span class='v once'><b>Ring</b></span>: best of one training each; a second training " +
      "may turn it round. ",
  },
  unbacked: {
    detail: "Nothing was kept that this value follows from: it takes no part in tests and ranks.",
    spoken: "nothing was kept to compute it again",
    key: "<span style='color:var(--soft)'>Pale</span>: nothing was kept to compute it again. ",
  },
  unsettled: {
    detail: "Not ranked: its note says why.",
    spoken: "not ranked",
    key: "<span class='v unsettled'><b>Dagger</b></span>: not ranked; the number's note says why. ",
  },
};

const measuredColumns = columns.filter(column => column.measured);
const nothingMeasured = !DATA.numbers;
const hasMain = measuredColumns.some(column => column.main);
const hasMinor = measuredColumns.some(column => !column.main);
// The columns that have a button for their task: all, where nothing is measured.
const shownFirst = nothingMeasured ? columns : measuredColumns;
// About 3000 numbers are drawn at first, so that a large board opens at once.
const PAGE = Math.max(20, Math.min(100, Math.floor(3000 / measuredColumns.length)));
const MORE = 500; // rows that a click adds
const state = {
  sort: null, // a column's place, or "name"; null is the page's own order
  up: false,
  filter: "",
  tasks: new Set(shownFirst.map(column => column.task)),
  published: true,
  only: nothingMeasured, // also columns that nobody measured
  every: !hasMain, // all metrics, or the first one of each measurement
  dataset: "",
  protocol: "",
  bySize: false, // metrics of small, medium and large objects
  limit: PAGE,
};

function isShown(column) {
  if (!state.tasks.has(column.task)) return false;
  if (!state.every && column.measured && !column.main) return false;
  if (state.dataset && datasetName(column) !== state.dataset) return false;
  if (state.protocol && protocolName(column) !== state.protocol) return false;
  if (!state.bySize && column.by_size) return false;
  return column.measured > 0 || (state.published && state.only);
}

function sorted(list) {
  if (state.sort == null) return inOrder(list);
  const way = state.up ? 1 : -1;
  if (state.sort === "name") {
    const byNumber = {numeric: true}; // x9 before x10
    return [...list].sort((a, b) => way * a.label.localeCompare(b.label, "en", byNumber));
  }
  // Values are looked up once. Rows without one come last in either order.
  return list
    .map(row => [valueAt(state.sort, row.index), row])
    .sort(([a, row], [b, other]) =>
      (a == null) - (b == null) || way * (a - b) || row.label.localeCompare(other.label))
    .map(([, row]) => row);
}

function number(k, row) {
  const cell = cells[k].get(row.index);
  if (!cell) return "";
  const where = `tabindex="-1" data-c="${k}" data-r="${row.index}"`;
  if (cell.value == null) return `<button class="v" ${where} title="undefined"><b>–</b></button>`;
  const {decimals} = columns[k];
  let half = "";
  let interval = "";
  if (cell.low != null) {
    half = `<small>±${num((cell.high - cell.low) / 2, decimals)}</small>`;
    interval = `, interval ${fromTo(cell.low, cell.high)}`;
  }
  const mark = MARKS[cell.mark] ? `; ${MARKS[cell.mark].spoken}` : "";
  const words = esc(`${row.label}, ${columnLabel(columns[k])}`);
  const label = `${words}: ${num(cell.value, 2)}${interval}${mark}`;
  return `<button class="v ${cell.mark}" ${where} aria-label="${label}">` +
    `<b>${num(cell.value, decimals)}</b>${half}${row.published ? "" : track(cell, range[k])}</button>`;
}

// The bar under a number: its interval and its value within its column's range.
function track(cell, [least, most]) {
  const at = v => between(100 * (v - least) / (most - least), 0, 100).toFixed(1);
  let bar = "";
  if (cell.low != null) {
    const wide = (at(cell.high) - at(cell.low)).toFixed(1);
    bar = `<i style="left:${at(cell.low)}%;width:${wide}%"></i>`;
  }
  return `<span class="t">${bar}<u style="left:${at(cell.value)}%"></u></span>`;
}

function line(row, shown) {
  const numbers = shown.map((k, n) => `<td class="${edge(shown, n)}">${number(k, row)}</td>`);
  const title = [row.checkpoint, row.hardware].filter(Boolean).join("\n");
  const name = row.published ? esc(row.method) : dot(colour(row.index), row.label);
  return `<tr><th scope="row" class="first" title="${esc(title)}">${name}` +
    `<small>${esc(about(row))}</small></th>${numbers.join("")}</tr>`;
}

// What stands under a checkpoint's name.
function about(row) {
  const epochs = row.epochs == null ? "" : row.epochs + " ep";
  const trained = row.trained == null ? "" : `trained at ${row.trained} px`;
  const facts = [row.arch, epochs, trained, row.cost];
  if (row.published) {
    const paper = /\(([^()]*)\)$/.exec(row.name)?.[1]; // "LORAC (table 1)"
    facts.unshift(paper);
  } else if (row.method !== row.name) {
    facts.unshift(row.method);
  }
  if (row.labs.length && labsOfAll.length > 1) facts.push("by " + row.labs.join(", "));
  return facts.filter(Boolean).join(" · ");
}

// Columns that share a heading stand together; `edge` is the line before a new one.
const SETTING = ["task", "dataset", "protocol", "engine", "split"];
function edge(shown, n) {
  const column = columns[shown[n]];
  const before = n ? columns[shown[n - 1]] : null;
  if (!before || column.task !== before.task) return "g d";
  return same(column, before, SETTING) ? "" : "d";
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

const sortDirection = k =>
  state.sort === k ? `aria-sort="${state.up ? "ascending" : "descending"}"` : "";
function heading(shown) {
  const tasks = groups(shown, ["task"]).map(group =>
    `<th class="g" colspan="${group.length}">${esc(taskName(columns[group[0]].task))}</th>`);
  const settings = groups(shown, SETTING).map(group => {
    const column = columns[group[0]];
    const name = esc(protocolName(column));
    const length = hasNamesake(column) ? "whole" : "";
    const protocol = `<span class="soft protocol ${length}" title="${name}">${name}</span>`;
    const line = edge(shown, shown.indexOf(group[0]));
    return `<th class="${line}" colspan="${group.length}">` +
      `${esc(datasetName(column))}<br>${protocol}</th>`;
  });
  const metrics = shown.map((k, n) => {
    const {name, heading} = columns[k];
    return `<th scope="col" class="${edge(shown, n)}" ${sortDirection(k)}>` +
      `<button class="sort" data-k="${k}" title="${esc(name)}">${esc(heading)}</button></th>`;
  });
  return `<thead><tr><th class="first" rowspan="2"></th>${tasks.join("")}</tr>` +
    `<tr>${settings.join("")}</tr>` +
    `<tr><th class="first" scope="col" ${sortDirection("name")}>` +
    `<button class="sort" data-k="name">Checkpoint</button></th>${metrics.join("")}</tr></thead>`;
}

function matches(row) {
  if (!state.filter) return true;
  return state.filter.split(/\s+/).every(word => row.text.includes(word));
}

function draw() {
  const shown = places.filter(k => isShown(columns[k]));
  const mine = sorted(measured.filter(matches));
  const hasNumber = row => shown.some(k => cells[k].has(row.index));
  const isPrinted = row => row.published && matches(row) && hasNumber(row);
  const theirs = state.published ? sorted(rows.filter(isPrinted)) : [];
  const lines = list => list.slice(0, state.limit).map(row => line(row, shown)).join("");
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
  const beyond = list => Math.max(0, list.length - state.limit);
  const left = beyond(mine) + beyond(theirs);
  const text = `Show ${Math.min(left, MORE)} more of ${left}`;
  $("more").innerHTML = left ? `<button class="plain" id="show-more">${text}</button>` : "";
  if (left) $("show-more").onclick = () => { state.limit += MORE; draw(); };
  sideways();
}

// The first click on a heading puts the highest first, or the first name; the next one turns it.
function sortBy(k) {
  state.up = state.sort === k ? !state.up : k === "name";
  state.sort = k;
  draw();
  $("board").querySelector(`.sort[data-k="${k}"]`)?.focus({preventScroll: true});
}

// One tab stop for all numbers; arrows move between them, over empty fields and the split.
const STEPS = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};
function neighbour(v, [down, right]) {
  let td = v.parentElement;
  let tr = td.parentElement;
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
    const heading = e.target.closest(".sort");
    if (heading) sortBy(heading.dataset.k === "name" ? "name" : +heading.dataset.k);
    const v = e.target.closest(".v");
    if (v) detail(+v.dataset.c, +v.dataset.r);
  });
  $("board").addEventListener("keydown", e => {
    const step = STEPS[e.key];
    const v = e.target.closest(".v");
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

// How many columns lie beyond the right edge.
function sideways() {
  const frame = $("frame");
  const beyond = frame.scrollWidth - frame.clientWidth > 4;
  $("sideways").hidden = !beyond;
  if (!beyond) return;
  const count = places.filter(k => isShown(columns[k])).length;
  $("sideways").textContent =
    `${plural(count, "column")}; more to the right: scroll sideways →`;
}

// ---- what chooses rows and columns

// A list to choose columns by, if there is more than one choice.
function choice(id, name, nameOf) {
  const all = [...new Set(measuredColumns.map(nameOf))];
  if (all.length < 2) return "";
  const list = [["", `all ${name}s`], ...all.map(one => [esc(one), cut(one, 40)])];
  return `<label>${name} <select id="${id}" data-key="${name}">${options(list, "")}</select></label>`;
}

const press = (element, on) => element.setAttribute("aria-pressed", String(on));
// A button in the element `id` that turns state[key] on and off.
function toggle(id, key, title, text) {
  $(id).innerHTML = button(state[key], ` title="${title}"`, text);
  $(id).firstChild.onclick = e => {
    state[key] = !state[key];
    press(e.target, state[key]);
    draw();
  };
}

function columnControls() {
  $("choices").innerHTML = choice("by-dataset", "dataset", datasetName) +
    choice("by-protocol", "protocol", protocolName);
  $("choices").querySelectorAll("select").forEach(list => list.onchange = () => {
    state[list.dataset.key] = list.value;
    draw();
  });
  if (hasMain && hasMinor) {
    const title = "AP50, top-5 and the like, beside each task's main metric";
    toggle("metrics", "every", title, "All metrics");
  }
  if (measuredColumns.some(column => column.by_size)) {
    toggle("minor", "bySize", DATA.sizes, "AP by size");
    // These are no main metrics, so all metrics are shown with them.
    $("minor").firstChild.addEventListener("click", () => {
      if (state.bySize && !state.every) $("metrics").firstChild?.click();
    });
  }
  $("filters").open = innerWidth > 640;
}

function taskControls() {
  const tasks = [...new Set(shownFirst.map(column => column.task))];
  if (tasks.length < 2) return;
  const one = task => button(true, ` data-t="${esc(task)}"`, esc(taskName(task)));
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

function publishedControls() {
  if (!rows.some(row => row.published)) return;
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
    const measuredTasks = new Set(measuredColumns.map(column => column.task));
    for (const column of columns.filter(column => !column.measured)) {
      if (state.only) state.tasks.add(column.task);
      else if (!measuredTasks.has(column.task)) state.tasks.delete(column.task);
    }
    press(only, state.only);
    draw();
  };
}
