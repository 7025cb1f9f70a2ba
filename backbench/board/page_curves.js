// -- pretraining

const isNumber = v => v != null && isFinite(v);
function curves() {
  if (!DATA.curves.length) return hide("curves");
  const names = [...new Set(DATA.curves.flatMap(curve => Object.keys(curve.y)))];
  const first = names.includes("loss") ? "loss" : names[0];
  names.sort((a, b) => (b === first) - (a === first) || a.localeCompare(b));
  const list = options(names.map(name => [name, name]), first);
  $("curve-controls").innerHTML = `<label>show <select id="cm">${list}</select></label>`;
  $("cm").onchange = paintCurves;
  paintCurves();
}

const MOST_CURVES = 12; // drawn at first
const curvesOff = new Set(DATA.curves.map((_, n) => n).slice(MOST_CURVES));
// A curve has its checkpoint's colour, where that is on the board.
const curveColour = (curve, n) => colour(curve.row ?? n);
function paintCurves() {
  const metric = $("cm").value;
  const list = DATA.curves.map((curve, n) => [curve, n]).filter(([curve]) => curve.y[metric]);
  const on = list.filter(([, n]) => !curvesOff.has(n));
  const w = between($("curve-chart").clientWidth - 26, 300, 1200);
  const h = Math.min(380, w * .75);
  const legend = list.map(([curve, n]) =>
    `<button aria-pressed="${!curvesOff.has(n)}" data-i="${n}">` +
    `${dot(curveColour(curve, n), curve.name)}</button>`);
  $("curve-chart").innerHTML =
    svg(w, h, curveLines(on, metric, w, h), "Pretraining curves: " + metric) +
    `<div class="legend">${legend.join("")}</div>` +
    `<p class="soft small">Losses of different methods have different scales: compare shapes, not ` +
    `heights. A name switches its curve off.</p>`;
  $("curve-chart").querySelectorAll(".legend button").forEach(b => b.onclick = () => {
    const n = +b.dataset.i;
    if (!curvesOff.delete(n)) curvesOff.add(n);
    paintCurves();
    $("curve-chart").querySelector(`.legend button[data-i="${n}"]`).focus();
  });
}

function curveLines(on, metric, w, h) {
  const xs = on.flatMap(([curve]) => curve.x);
  const ys = on.flatMap(([curve]) => curve.y[metric]).filter(isNumber);
  if (!ys.length) return "";
  // The words of each mark stand on a line of their own above the curves, which cross none of them
  const count = on.reduce((sum, [curve]) => sum + curve.marks.length, 0);
  const left = 56, right = 12, top = 12 + LINE * count, bottom = 38;
  const last = Math.max(...xs) || 1;
  const lowest = Math.min(...ys), highest = Math.max(...ys);
  const room = (highest - lowest || 1) * .05;
  const {X, Y, under, rulesY} =
    frame(w, h, [left, right, top, bottom], [0, last], [lowest - room, highest + room]);
  let body = ticks(0, last).map(v => under(v, 17)).join("") + rulesY() +
    `<text class="soft" x="${(left + w) / 2}" y="${h - 4}" text-anchor="middle">step</text>`;
  let marks = 0;
  for (const [curve, n] of on) {
    const color = curveColour(curve, n);
    for (const mark of curve.marks) {
      const late = X(mark.x) > w * .6; // then its words stand to the left of it
      const y = 11 + LINE * marks;
      marks += 1;
      body += `<line class="mark" x1="${X(mark.x)}" x2="${X(mark.x)}" y1="${top}" y2="${h - bottom}"` +
        ` style="stroke:${color};stroke-dasharray:4 3"/>` +
        `<text class="marked" x="${X(mark.x) + (late ? -5 : 5)}" y="${y}"` +
        ` text-anchor="${late ? "end" : "start"}"` +
        ` style="fill:${color};font-size:11px">${esc(curve.name)}: ${esc(mark.text)}</text>`;
    }
    let pen = "M"; // M begins anew after a gap, L goes on
    let path = "";
    curve.x.forEach((x, j) => {
      const y = curve.y[metric][j];
      if (isNumber(y)) {
        path += `${pen}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`;
        pen = "L";
      } else {
        pen = "M";
      }
    });
    body += `<g class="s"><path class="line" d="${path}" style="stroke:${color}">` +
      `<title>${esc(curve.name)}</title></path></g>`;
  }
  return body;
}
