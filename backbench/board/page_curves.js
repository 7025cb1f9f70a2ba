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
  let marks = 0; // each says what it is on a line of its own
  for (const [c, i] of on) {
    for (const m of c.marks) {
      const late = X(m.x) > w * .6, y = T + 11 + LINE * marks++;
      body += `<line class="mark" x1="${X(m.x)}" x2="${X(m.x)}" y1="${T}" y2="${h - B}"` +
        ` style="stroke:${curveColour(c, i)};stroke-dasharray:4 3"/>` +
        `<text class="marked" x="${X(m.x) + (late ? -5 : 5)}" y="${y}"` +
        ` text-anchor="${late ? "end" : "start"}"` +
        ` style="fill:${curveColour(c, i)};font-size:11px">${esc(c.name)}: ${esc(m.text)}</text>`;
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
