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
  const few = n < 8 ? " So few checkpoints show no reliable relation." : "";
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
  const both = {k, va, vb, p: p.p, real: p.real, known: p.known, paired: p.paired, n: p.n};
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
    `<p class="soft small">The tests use the predictions that both runs kept, image by image (draws ` +
    `and images for few labels and several seeds, resamples for detection), and how far trainings ` +
    `with other seeds differ. A checkpoint is called better only if p &lt; 0.05 and the interval does ` +
    `not contain 0. <em>One training each</em>: p and interval are of these images alone, and say ` +
    `nothing of a second training. Two equal checkpoints may still be called different in about one ` +
    `of 20 columns.</p>`;
}

function differenceLine(x, better, far) {
  const c = columns[x.k], tested = x.low != null;
  const small = (size, text) => `<div class="soft" style="font-size:${size}rem">${text}</div>`;
  let interval = "", p = "", verdict = `<span class="soft">not tested</span>`;
  if (tested) {
    interval = small(".8", `${num(x.low, 2)} to ${num(x.high, 2)}`);
    verdict = x.real
      ? `<span class="real ${x.d > 0 ? "pos" : "neg"}">${esc(better.label)} is better</span>`
      : `<span class="soft">${x.known ? "within noise" : "one training each"}</span>`;
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
