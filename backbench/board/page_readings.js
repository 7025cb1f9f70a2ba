// -- single readings: label curves, layers, the errors of detectors

// What columns share but for their metric, in words.
const settingOf = column => `${datasetName(column)} · ${protocolName(column)}`;
// A list to choose one of several settings by. `list` holds columns.
function settingChoice(id, list, paint) {
  const names = [...new Set(list.map(settingOf))];
  if (names.length > 1) {
    const choices = options(names.map(name => [esc(name), cut(name, 60)]), names[0]);
    $(`${id}-controls`).innerHTML = `<label>of <select id="${id}-of">${choices}</select></label>`;
    $(`${id}-of`).onchange = paint;
  } else {
    $(`${id}-controls`).innerHTML = `<span class="soft small">${esc(names[0])}</span>`;
  }
}
const chosenSetting = (id, list) => $(`${id}-of`)?.value ?? settingOf(list[0]);

const MOST_READ = 12; // checkpoints that are drawn at first
// A legend of rows whose buttons switch one off and on. `off` has the rows' indices.
function rowLegend(element, list, off, paint) {
  element.innerHTML = list.map(row =>
    `<button aria-pressed="${!off.has(row.index)}" data-i="${row.index}">` +
    `${dot(colour(row.index), row.label)}</button>`).join("");
  element.querySelectorAll("button").forEach(b => b.onclick = () => {
    const index = +b.dataset.i;
    if (!off.delete(index)) off.add(index);
    paint();
    element.querySelector(`button[data-i="${index}"]`)?.focus();
  });
}
// The rows of a setting beyond the first ones are off until somebody asks for them.
function offAtFirst(seen, name, list) {
  if (!seen.has(name)) seen.set(name, new Set(list.slice(MOST_READ).map(row => row.index)));
  return seen.get(name);
}

// - how many labels

const curveColumns = () => DATA.label_curves.map(curve => columns[curve.columns[0]]);
function labelCurves() {
  if (!DATA.label_curves.length) return hide("labels");
  settingChoice("labels", curveColumns(), paintLabelCurves);
  paintLabelCurves();
}

const labelsOff = new Map(); // setting -> rows that are not drawn
function paintLabelCurves() {
  const name = chosenSetting("labels", curveColumns());
  const mine = DATA.label_curves.filter(curve => settingOf(columns[curve.columns[0]]) === name);
  const list = inOrder([...new Set(mine.map(curve => rows[curve.row]))]);
  const off = offAtFirst(labelsOff, name, list);
  const w = between($("labels-chart").clientWidth - 26, 300, 900);
  const h = Math.min(400, w * .75);
  const on = mine.filter(curve => !off.has(curve.row));
  $("labels-chart").innerHTML =
    svg(w, h, labelLines(on, w, h), "Accuracy by labelled images of each class: " + name) +
    `<div class="legend"></div>`;
  rowLegend($("labels-chart").querySelector(".legend"), list, off, paintLabelCurves);
}

function labelLines(on, w, h) {
  const points = on.flatMap(curve => curve.columns.map(k => cells[k].get(curve.row)));
  if (!points.length) return "";
  const left = 52, right = 16, top = 12, bottom = 42;
  const counts = on.flatMap(curve => curve.labels);
  const xs = [Math.log(Math.min(...counts)), Math.log(Math.max(...counts))];
  const room = (xs[1] - xs[0]) * .03;
  const {X, Y, rulesY} = frame(
    w, h, [left, right, top, bottom], [xs[0] - room, xs[1] + room], extent(points));
  // Numbers of labels are told where there is room for them
  let free = -Infinity;
  let body = rulesY();
  for (const labels of [...new Set(counts)].sort((a, b) => a - b)) {
    const x = X(Math.log(labels));
    if (x < free) continue;
    free = x + 40;
    body += `<text class="soft" x="${x}" y="${h - bottom + 17}" text-anchor="middle">` +
      `${tick(+labels.toFixed(1))}</text>`;
  }
  body += `<text class="soft" x="${(left + w) / 2}" y="${h - 4}" text-anchor="middle">` +
    `labels of each class; upwards: ${esc(columns[on[0].columns[0]].heading.split(" ")[0])}</text>`;
  for (const curve of on) {
    const color = colour(curve.row);
    const of = curve.columns.map((k, n) => [X(Math.log(curve.labels[n])), cells[k].get(curve.row)]);
    const path = of.map(([x, cell]) => `${x.toFixed(1)} ${Y(cell.value).toFixed(1)}`).join("L");
    const bars = of.filter(([, cell]) => cell.low != null).map(([x, cell]) =>
      `<line x1="${x}" x2="${x}" y1="${Y(cell.low)}" y2="${Y(cell.high)}"` +
      ` style="stroke:${color};opacity:.5;stroke-width:2"/>`);
    const dots = of.map(([x, cell], n) => {
      const interval = cell.low == null ? "" : ` (${fromTo(cell.low, cell.high)})`;
      return `<circle cx="${x}" cy="${Y(cell.value)}" r="4" style="fill:${color}"><title>` +
        `${esc(rows[curve.row].label)}, ${tick(+curve.labels[n].toFixed(1))} labels: ` +
        `${num(cell.value, 2)}${interval}</title></circle>`;
    });
    body += `<g class="s">${bars.join("")}<path class="line" d="M${path}" style="stroke:${color}"/>` +
      `${dots.join("")}</g>`;
  }
  return body;
}

// - layers and poolings

const layerColumns = () => DATA.layers.map(one => columns[one.column]);
function layers() {
  if (!DATA.layers.length) return hide("layers");
  settingChoice("layers", layerColumns(), paintLayers);
  paintLayers();
}

// A pooling keeps its colour on all drawings.
const POOLINGS = ["cls", "mean", "cls+mean", "max"];
const poolingColour = name => colour(Math.max(POOLINGS.indexOf(name), 0));
function paintLayers() {
  const name = chosenSetting("layers", layerColumns());
  const every = DATA.layers.filter(one => settingOf(columns[one.column]) === name);
  every.sort((a, b) => order[a.row] - order[b.row]);
  const mine = every.slice(0, MOST_READ);
  const wide = $("layers-list").clientWidth;
  const w = between(wide > 1000 ? wide / 2 - 40 : wide - 28, 280, 640);
  const h = Math.min(320, w * .7);
  $("layers-list").innerHTML = mine.map(one => {
    const {label} = rows[one.row];
    const chart = svg(w, h, layerLines(one, w, h), `Scores of the layers of ${label} on val`);
    return `<figure><div style="overflow-x:auto;padding:.6rem .6rem 0">${chart}</div>` +
      `<figcaption>${layerWords(one)}</figcaption></figure>`;
  }).join("");
  const poolings = POOLINGS.filter(pooling => mine.some(one => pooling in one.scores));
  const mark = inside => `<svg width="26" height="12" aria-hidden="true">${inside}</svg> `;
  const left = every.length - mine.length;
  $("layers-legend").innerHTML =
    poolings.map(pooling => `<span>${dot(poolingColour(pooling), pooling)}</span>`).join("") +
    `<span>${mark(USUAL_LINE("x1=\"0\" x2=\"26\"", 6))}the usual reading</span>` +
    `<span>${mark(RING(13, 6, 5))}chosen</span>` +
    (left ? `<span class="soft">${plural(left, "more checkpoint")} not drawn</span>` : "");
}
const USUAL_LINE = (ends, y) =>
  `<line ${ends} y1="${y}" y2="${y}" style="stroke:var(--ink);stroke-width:1.5;stroke-dasharray:5 4"/>`;
const RING = (x, y, r) =>
  `<circle cx="${x}" cy="${y}" r="${r}" style="fill:none;stroke:var(--ink);stroke-width:2"/>`;

function layerWords(one) {
  const name = `<b>${esc(rows[one.row].label)}</b>`; // colours are those of poolings here
  const usual = one.usual === "usual" ? "its usual reading" : `the usual ${esc(one.usual)}`;
  const {heading} = columns[one.column];
  if (one.chosen === one.usual) {
    return `${name}: ${usual} was chosen; ${num(one.value, 2)} ${esc(heading)} on the test images`;
  }
  let gain = "";
  if (one.gain != null) {
    const sure = one.low > 0 || one.high < 0 ? ` class="real"` : "";
    gain = `, <span${sure}>${signed(one.gain)} (${fromTo(one.low, one.high)})</span> against ${usual}`;
  } else if (one.usual_value != null) {
    gain = `; ${usual}: ${num(one.usual_value, 2)}`;
  }
  return `${name}: ${esc(one.chosen)} was chosen; ${num(one.value, 2)} ${esc(heading)}` +
    ` on the test images${gain}`;
}
const signed = value => (value > 0 ? "+" : "") + num(value, 2);

function layerLines(one, w, h) {
  const left = 46, right = 14, top = 12, bottom = 40;
  const ys = [...Object.values(one.scores).flat(), one.usual_score].filter(isNumber);
  const lowest = Math.min(...ys), highest = Math.max(...ys);
  const room = (highest - lowest || 1) * .08;
  const last = one.layers.length - 1;
  const {X, Y, rulesY} = frame(
    w, h, [left, right, top, bottom], [-.3, last + .3], [lowest - room, highest + room]);
  const [what] = one.layers[0].split(" ");
  // Numbers of layers are told where there is room for them
  const every = Math.ceil(24 * one.layers.length / (w - left - right));
  let body = rulesY();
  one.layers.forEach((layer, n) => {
    if (n % every) return;
    body += `<text class="soft" x="${X(n)}" y="${h - bottom + 17}" text-anchor="middle">` +
      `${esc(layer.split(" ")[1])}</text>`;
  });
  body += `<text class="soft" x="${(left + w) / 2}" y="${h - 4}" text-anchor="middle">` +
    `${esc(what)}; upwards: percent on val</text>`;
  if (one.usual_score != null) {
    body += USUAL_LINE(`x1="${left}" x2="${w - right}"`, Y(one.usual_score));
  }
  for (const [pooling, scores] of Object.entries(one.scores)) {
    const color = poolingColour(pooling);
    let pen = "M";
    let path = "";
    let dots = "";
    scores.forEach((score, n) => {
      if (!isNumber(score)) {
        pen = "M";
        return;
      }
      path += `${pen}${X(n).toFixed(1)} ${Y(score).toFixed(1)}`;
      pen = "L";
      dots += `<circle cx="${X(n)}" cy="${Y(score)}" r="3.5" style="fill:${color}"><title>` +
        `${esc(one.layers[n])} ${esc(pooling)}: ${num(score, 2)}</title></circle>`;
    });
    body += `<g class="s"><path class="line" d="${path}" style="stroke:${color}"/>${dots}</g>`;
  }
  // The chosen reading is a point of a line, or the usual reading that no layer gives
  const [, layer, pooling] = /^(.*) (\S+)$/.exec(one.chosen) ?? [];
  const n = one.layers.indexOf(layer);
  if (n >= 0 && isNumber(one.scores[pooling]?.[n])) {
    body += RING(X(n), Y(one.scores[pooling][n]), 8);
  } else if (one.chosen_score != null) {
    body += RING(w - right - 9, Y(one.chosen_score), 8);
  }
  return body;
}

// - what errors cost detectors

const errorColumns = () => DATA.errors.map(one => columns[Object.values(one.costs)[0]]);
// Boxes and masks of one detector are two drawings.
const errorName = (one, n) => {
  const column = errorColumns()[n];
  const shape = one.ap == null ? "" : columns[one.ap].metric.replace("_AP50", "");
  const task = one.ap == null ? "" : taskName(columns[one.ap].task);
  return [task, shape, settingOf(column)].filter(Boolean).join(" · ");
};
function errors() {
  if (!DATA.errors.length) return hide("errors");
  const names = DATA.errors.map(errorName);
  if (names.length > 1) {
    const choices = options(names.map((name, n) => [n, cut(name, 70)]), 0);
    $("errors-controls").innerHTML = `<label>of <select id="errors-of">${choices}</select></label>`;
    $("errors-of").onchange = paintErrors;
  } else {
    $("errors-controls").innerHTML = `<span class="soft small">${esc(names[0])}</span>`;
  }
  paintErrors();
}

const errorsOff = new Map(); // which drawing -> rows that are not drawn
function paintErrors() {
  const n = +($("errors-of")?.value ?? 0);
  const one = DATA.errors[n];
  const ap = row => one.ap == null ? null : valueAt(one.ap, row.index);
  const isCosted = row => Object.values(one.costs).some(k => valueAt(k, row.index) != null);
  const list = measured.filter(isCosted).sort((a, b) => ap(b) - ap(a) || a.index - b.index);
  const off = offAtFirst(errorsOff, n, list);
  const on = list.filter(row => !off.has(row.index));
  const w = between($("errors-chart").clientWidth - 26, 300, 1000);
  const h = Math.min(360, w * .7);
  $("errors-chart").innerHTML =
    svg(w, h, errorBars(one, on, w, h), "Points of AP50 that each kind of error costs") +
    `<div class="legend"></div>`;
  rowLegend($("errors-chart").querySelector(".legend"), list, off, paintErrors);
  $("errors-table").innerHTML = errorTable(one, list);
}

function errorBars(one, on, w, h) {
  const kinds = Object.entries(one.costs);
  const left = 46, right = 10, top = 12, bottom = 40;
  const values = kinds.flatMap(([, k]) => on.map(row => valueAt(k, row.index) ?? 0));
  const highest = Math.max(...values, 0) || 1;
  const {X, Y, rulesY} = frame(
    w, h, [left, right, top, bottom], [0, kinds.length], [0, highest * 1.05]);
  let body = rulesY();
  const narrow = (w - left - right) / kinds.length < 76;
  const wide = (X(1) - X(0)) * .8 / Math.max(on.length, 1);
  const bar = Math.min(wide, 46);
  const bars = on.map(() => "");
  kinds.forEach(([kind, k], at) => {
    const middle = X(at + .5);
    body += `<text class="soft" x="${middle}" y="${h - bottom + 17}" text-anchor="middle"` +
      `${narrow ? ` style="font-size:9px"` : ""}>${esc(narrow ? cut(kind, 8) : kind)}</text>`;
    on.forEach((row, n) => {
      const value = valueAt(k, row.index);
      if (value == null) return;
      const x = middle + (n - on.length / 2) * bar;
      bars[n] += `<rect x="${x + .5}" y="${Y(value)}" width="${Math.max(bar - 1, 1)}"` +
        ` height="${Math.max(Y(0) - Y(value), .5)}" style="fill:${colour(row.index)}">` +
        `<title>${esc(row.label)}, ${esc(kind)}: ${num(value, 2)}</title></rect>`;
    });
  });
  body += bars.map(of => `<g class="s">${of}</g>`).join("");
  return body + `<text class="soft" x="${(left + w) / 2}" y="${h - 4}" text-anchor="middle">` +
    `kind of error; upwards: points of AP50</text>`;
}

// Each detector's AP50 and costs, with the differences from the first one's where they were tested.
function errorTable(one, list) {
  const [first] = list;
  let tested = false;
  const cost = (row, k) => {
    const value = valueAt(k, row.index);
    if (value == null) return "";
    const gap = row === first ? null : differenceIn(k, row.index, first.index);
    if (gap == null || gap.low == null) return num(value, 2);
    tested = true;
    const sure = gap.low > 0 || gap.high < 0 ? " real" : "";
    return `${num(value, 2)}<div class="soft${sure}" style="font-size:.8rem">` +
      `${signed(gap.value)}<br>${fromTo(gap.low, gap.high)}</div>`;
  };
  const kinds = [{heading: "Checkpoint", cell: row => dot(colour(row.index), row.label)}];
  if (one.ap != null) {
    kinds.push({heading: "AP50", number: true, cell: row => num(valueAt(one.ap, row.index), 2)});
  }
  for (const [kind, k] of Object.entries(one.costs)) {
    kinds.push({heading: esc(kind), number: true, cell: row => cost(row, k)});
  }
  const table = dataTable(kinds, list);
  if (!tested) return table;
  return `${table}<p class="soft small">Below a number: its difference from ` +
    `${esc(first.label)}'s, with the 95% interval for new test images; bold where it does not ` +
    `contain 0.</p>`;
}
