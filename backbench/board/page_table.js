// ---- the table

const shownFirst = columns.filter(c => c.measured || !D.numbers); // all, where nothing is measured
const PAGE = Math.max(20, Math.min(100, Math.floor(3000 / columns.filter(c => c.measured).length)));
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
  // Rows without a value come last in either order.
  return list
    .map(r => [valueAt(state.sort, r.i), r])
    .sort(([a, r], [b, q]) => (a == null) - (b == null) || way * (a - b) || byLabel(r, q, []))
    .map(([, r]) => r);
}

const SAID = {
  best: "; best by a paired test",
  tied: "; not separated from the best by a test",
  untested: "; highest, not tested",
  once: "; best of one training each",
  unbacked: "; nothing was kept to compute it again",
  unsettled: "; not ranked",
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
  const labs = r.labs.length && labsOfAll.length > 1 ? "by " + r.labs.join(", ") : null;
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

// How many columns lie beyond the right edge.
function sideways() {
  const frame = $("frame"), hint = $("sideways");
  const beyond = frame.scrollWidth - frame.clientWidth > 4;
  hint.hidden = !beyond;
  if (!beyond) return;
  const count = places.filter(k => isShown(columns[k])).length;
  hint.textContent = `${plural(count, "column")}; more to the right: scroll sideways →`;
}

// A list to choose columns by, if there is more than one choice.
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
