// -- one column against another

function transfer() {
  const able = places.filter(k => columns[k].measured > 2);
  if (able.length < 2) return hide("transfer");
  const first = test => able.find(k => test(columns[k], k));
  const isImagenet = column =>
    column.dataset === "imagenet" && column.metric === "top1" && column.task === "linear";
  const across = first(isImagenet) ?? first(column => column.task === "linear") ?? able[0];
  const isOther = column => column.ranks && column.task !== columns[across].task;
  const up = first(isOther) ?? first((_, k) => k !== across);
  const list = able.map(k => [k, columnLabel(columns[k])]);
  $("transfer-controls").innerHTML =
    `<label>across <select id="tx">${options(list, across)}</select></label>` +
    `<label>up <select id="ty">${options(list, up)}</select></label>`;
  $("tx").onchange = $("ty").onchange = paintTransfer;
  paintTransfer();
}
const paintTransfer = () => scatter(+$("tx").value, +$("ty").value);

function scatter(kx, ky) {
  const points = rows
    .filter(row => valueAt(kx, row.index) != null && valueAt(ky, row.index) != null)
    .map(row => ({row, x: cells[kx].get(row.index), y: cells[ky].get(row.index)}));
  if (!points.length) {
    $("transfer-chart").innerHTML = "<p class='soft'>No checkpoint has both numbers.</p>";
    return;
  }
  const w = between($("transfer-chart").clientWidth - 26, 300, 900);
  const h = Math.min(430, w * .8);
  const left = 52, right = 60, top = 14, bottom = 44;
  const xs = extent(points.map(point => point.x));
  const ys = extent(points.map(point => point.y));
  const {X, Y, down, under, rulesY} = frame(w, h, [left, right, top, bottom], xs, ys);
  let body = ticks(...xs).map(v => down(v) + under(v, 16)).join("") + rulesY() +
    `<text class="soft" x="${(left + w - right) / 2}" y="${h - 6}" text-anchor="middle">` +
    `${esc(shortLabel(columns[kx]))}</text>`;
  const at = points.map(point => [X(point.x.value), Y(point.y.value)]);
  // Labels stand beside the bars of the intervals, too
  const bars = points.flatMap(({x, y}) => [
    [X(x.low ?? x.value), Y(y.value) - 1, X(x.high ?? x.value), Y(y.value) + 1],
    [X(x.value) - 1, Y(y.high ?? y.value), X(x.value) + 1, Y(y.low ?? y.value)],
  ]);
  const labels = placed(at, points.map(point => cut(point.row.label, 22)), w, h - bottom, bars);
  // All bars are below all names
  body += points.map(point => intervalBars(point, X, Y)).join("");
  points.forEach((point, n) => body += scatterPoint(point, X, Y, labels[n]));
  const upwards = `<span class="soft">Upwards: ${esc(shortLabel(columns[ky]))}.</span>`;
  $("transfer-chart").innerHTML = `<p class="small">${correlation(points)} ${upwards}</p>` +
    svg(w, h, body, "Scatter of two tasks");
}

// From the lowest to the highest of numbers with their intervals, and a little room on either side.
function extent(numbers) {
  const ends = numbers.flatMap(cell => [cell.low ?? cell.value, cell.high ?? cell.value]);
  const least = Math.min(...ends);
  const most = Math.max(...ends);
  const room = (most - least || 2) * .06;
  return [least - room, most + room];
}

const scatterColour = row => row.published ? "var(--soft)" : colour(row.index);
function intervalBars({row, x, y}, X, Y) {
  const bar = (x1, x2, y1, y2) =>
    `<line x1="${x1}" x2="${x2}" y1="${y1}" y2="${y2}"` +
    ` style="stroke:${scatterColour(row)};opacity:.5"/>`;
  const px = X(x.value), py = Y(y.value);
  return (x.low == null ? "" : bar(X(x.low), X(x.high), py, py)) +
    (y.low == null ? "" : bar(px, px, Y(y.low), Y(y.high)));
}

function scatterPoint({row, x, y}, X, Y, place) {
  const color = scatterColour(row);
  const px = X(x.value), py = Y(y.value);
  const style = row.published ? `fill:none;stroke:${color}` : `fill:${color}`;
  const title = `${esc(row.label)}: ${num(x.value, 2)}, ${num(y.value, 2)}`;
  let label = "";
  if (place) {
    const [left, top, text] = place;
    label = `<text class="name" x="${left}" y="${top}" style="fill:${color};font-size:11px">` +
      `${esc(text)}</text>`;
  }
  return `<g class="s"><circle cx="${px}" cy="${py}" r="5" style="${style}">` +
    `<title>${title}</title></circle>${label}</g>`;
}

const mean = values => values.reduce((a, b) => a + b, 0) / values.length;
function pearson(x, y) {
  const mx = mean(x), my = mean(y);
  let xy = 0, xx = 0, yy = 0;
  x.forEach((v, n) => {
    xy += (v - mx) * (y[n] - my);
    xx += (v - mx) ** 2;
    yy += (y[n] - my) ** 2;
  });
  return xy / Math.sqrt(xx * yy);
}
// The rank of each value, from 0 for the lowest; equal values share their mean rank.
function rankOf(values) {
  const list = values.map((v, n) => [v, n]).sort((a, b) => a[0] - b[0]);
  const out = [];
  let from = 0;
  while (from < list.length) {
    let to = from;
    while (to < list.length && list[to][0] === list[from][0]) to++;
    for (let k = from; k < to; k++) out[list[k][1]] = (from + to - 1) / 2;
    from = to;
  }
  return out;
}

function correlation(points) {
  const own = points.filter(point => !point.row.published);
  const n = own.length;
  if (n < 3) return "Fewer than three measured checkpoints have both.";
  const x = own.map(point => point.x.value);
  const y = own.map(point => point.y.value);
  const r = pearson(x, y);
  const rho = pearson(rankOf(x), rankOf(y));
  let interval = "";
  // Fisher's z: atanh(r) is nearly normal, with variance 1 / (n - 3).
  if (n > 3 && Math.abs(r) < 1) {
    const z = Math.atanh(r);
    const half = 1.96 / Math.sqrt(n - 3);
    interval = ` (95% interval ${fromTo(Math.tanh(z - half), Math.tanh(z + half))})`;
  }
  const few = n < 8 ? " So few checkpoints show no reliable relation." : "";
  return `Pearson r = ${num(r, 2)}${interval}, Spearman ρ = ${num(rho, 2)}, ` +
    `over ${n} measured checkpoints.${few}`;
}

// -- one checkpoint against another

function compare() {
  if (measured.length < 2) return hide("compare");
  const list = measured.map(row => [row.index, row.label]);
  const best = inOrder(measured)[0];
  const worst = inOrder(measured).at(-1);
  const select = (id, name, chosen) =>
    `<select id="${id}" aria-label="${name} checkpoint">${options(list, chosen.index)}</select>`;
  $("compare-controls").innerHTML =
    `${select("ca", "First", best)}<span class="soft">minus</span>` +
    `${select("cb", "Second", worst)}<button class="plain" id="swap">Swap</button>`;
  const paint = () => paintDifferences(+$("ca").value, +$("cb").value);
  $("ca").onchange = $("cb").onchange = paint;
  $("swap").onclick = () => {
    [$("ca").value, $("cb").value] = [$("cb").value, $("ca").value];
    paint();
  };
  paint();
}

// Row a minus row b in column k: tested where predictions were kept, else the plain difference.
function differenceIn(k, a, b) {
  const both = {k, of: [valueAt(k, a), valueAt(k, b)]};
  const pair = pairs.get(pairKey(k, Math.min(a, b), Math.max(a, b)));
  if (!pair) return {...both, value: both.of[0] - both.of[1], low: null};
  if (a < b) return {...pair, ...both};
  return {...pair, ...both, value: -pair.value, low: -pair.high, high: -pair.low};
}

function paintDifferences(a, b) {
  const shared = places.filter(k => valueAt(k, a) != null && valueAt(k, b) != null);
  if (a === b || !shared.length) {
    const why = a === b ? "Choose two checkpoints." : "They have no number in common.";
    $("compare-table").innerHTML = `<p class="soft">${why}</p>`;
    return;
  }
  const list = shared.map(k => differenceIn(k, a, b));
  const kinds = differenceColumns(rows[a], rows[b], list);
  $("compare-table").innerHTML =
    `${dataTable(kinds, list)}<p class="soft small">${explanations(kinds)}</p>`;
}

// The kinds of columns (see dataTable) of the differences between two rows.
function differenceColumns(a, b, list) {
  const ends = list.flatMap(gap =>
    [Math.abs(gap.low ?? gap.value), Math.abs(gap.high ?? gap.value)]);
  const far = Math.max(1, ...ends.filter(Number.isFinite));
  const isTested = gap => gap.low != null;
  return [
    {
      heading: "Column",
      cell: ({k}) =>
        `${esc(shortLabel(columns[k]))}${small(".76", esc(protocolName(columns[k])))}`,
    },
    {heading: esc(a.label), number: true, wide: true, cell: gap => num(gap.of[0], 2)},
    {heading: esc(b.label), number: true, wide: true, cell: gap => num(gap.of[1], 2)},
    {
      heading: "difference, 95% interval",
      number: true,
      cell: gap => {
        const interval = isTested(gap) ? small(".8", fromTo(gap.low, gap.high)) : "";
        return `${gap.value > 0 ? "+" : ""}${num(gap.value, 2)}${interval}`;
      },
    },
    {heading: "", wide: true, cell: gap => differenceStrip(gap, far)},
    {
      heading: "verdict",
      cell: gap => verdict(gap, gap.value > 0 ? a : b),
      explained: "The tests use the predictions that both runs kept, image by image (draws and " +
        "images for few labels and several seeds, resamples for detection), and how far " +
        "trainings with other seeds differ. A checkpoint is called better only if p &lt; 0.05 " +
        "and the interval does not contain 0. <em>One training each</em>: p and interval are of " +
        "these images alone, and say nothing of a second training. Two equal checkpoints may " +
        "still be called different in about one of 20 columns.",
    },
    {
      heading: "paired over",
      wide: true,
      soft: true,
      cell: gap => isTested(gap) ? `${gap.n} ${esc(gap.paired)}` : "",
    },
  ];
}

function verdict(gap, better) {
  let said = `<span class="soft">not tested</span>`;
  if (gap.low != null && gap.real) {
    const tone = gap.value > 0 ? "pos" : "neg";
    said = `<span class="real ${tone}">${esc(better.label)} is better</span>`;
  } else if (gap.low != null) {
    said = `<span class="soft">${gap.known ? "within noise" : "one training each"}</span>`;
  }
  if (gap.p == null) return said;
  return said + small(".76", `p ${gap.p < .001 ? "< 0.001" : "= " + gap.p.toFixed(3)}`);
}

// The interval of a difference around 0, as a line and a dot.
function differenceStrip(gap, far) {
  const W = 220;
  const X = v => W / 2 + (W / 2 - 6) * between(v / far, -1, 1);
  let color = "var(--soft)";
  if (gap.real) color = gap.value > 0 ? "var(--best)" : "var(--bad)";
  let bar = "";
  if (gap.low != null) {
    bar = `<line x1="${X(gap.low)}" x2="${X(gap.high)}" y1="9" y2="9"` +
      ` style="stroke:${color};stroke-width:3"/>`;
  }
  return `<svg width="${W}" height="18" viewBox="0 0 ${W} 18" aria-hidden="true">` +
    `<line class="axis" x1="${W / 2}" x2="${W / 2}" y1="0" y2="18"/>${bar}` +
    `<circle cx="${X(gap.value)}" cy="9" r="4" style="fill:${color}"/></svg>`;
}
