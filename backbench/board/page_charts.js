// ---- charts

const svg = (w, h, body, label) =>
  `<svg viewBox="0 0 ${w} ${h}" width="${w}" height="${h}" role="img" aria-label="${esc(label)}"` +
  ` style="max-width:none;display:block">${body}</svg>`;
// The number at a tick: 12.5, or 3k for 3000.
function tick(value) {
  if (Math.abs(value) < 1000) return String(+value.toFixed(3));
  return (value / 1000).toFixed(Math.abs(value) % 1000 ? 1 : 0) + "k";
}

// About n round numbers from a to b: steps of 1, 2, 2.5 or 5 times a power of ten.
function ticks(a, b, n = 5) {
  const raw = (b - a) / n;
  const magnitude = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find(s => s * magnitude >= raw) * magnitude;
  const out = [];
  for (let v = Math.ceil(a / step) * step; v <= b + 1e-9; v += step) out.push(+v.toFixed(10));
  return out;
}

// Places for the labels of points: beside, above or below a point, the first place that covers
// neither a point, nor another label, nor one of the `lines` (boxes around their pieces). Where lines
// are everywhere, a label may stand on one, which its edge hides. A point without a free place gets
// null, and only its title shows its name.
const LETTER = 6.3; // width of a letter of 11px text, in pixels
const LINE = 13; // its height
const MOST_LABELS = 60; // points; more of them have no room for names
function placed(points, texts, w, h, lines = []) {
  if (points.length > MOST_LABELS) return points.map(() => null);
  // Boxes are [left, top, right, bottom].
  const hits = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
  const dots = points.map(([x, y]) => [x - 6, y - 6, x + 6, y + 6]);
  const taken = [];
  return points.map(([x, y], i) => {
    const wide = LETTER * texts[i].length;
    const corners = [
      [x + 6, y - 18], [x + 6, y + 5], [x - 6 - wide, y - 18], [x - 6 - wide, y + 5],
      [x + 9, y - 7], [x - 9 - wide, y - 7], [x - wide / 2, y - 24], [x - wide / 2, y + 11],
      [x + 10, y - 32], [x - 10 - wide, y - 32], [x + 10, y + 18], [x - 10 - wide, y + 18],
    ];
    const free = corners.map(([left, top]) => [left, top, left + wide, top + LINE]).filter(box => {
      const inside = box[0] > 0 && box[2] < w && box[1] > 0 && box[3] < h;
      const covers = taken.some(b => hits(b, box)) || dots.some((b, j) => j !== i && hits(b, box));
      return inside && !covers;
    });
    const box = free.find(one => !lines.some(b => hits(b, one))) ?? free[0];
    if (!box) return null;
    taken.push(box);
    return [box[0], box[1] + 10, texts[i]];
  });
}

// A chart of w x h pixels whose axes run from xa to xb and from ya to yb: X and Y turn values into
// places, the others draw rules and the numbers beside them.
function frame(w, h, [left, right, top, bottom], [xa, xb], [ya, yb]) {
  const X = v => left + (w - left - right) * (v - xa) / (xb - xa);
  const Y = v => h - bottom - (h - top - bottom) * (v - ya) / (yb - ya);
  const down = v =>
    `<line class="axis" x1="${X(v)}" x2="${X(v)}" y1="${top}" y2="${h - bottom}"/>`;
  const across = v =>
    `<line class="axis" x1="${left}" x2="${w - right}" y1="${Y(v)}" y2="${Y(v)}"/>`;
  const under = (v, gap) =>
    `<text class="soft" x="${X(v)}" y="${h - bottom + gap}" text-anchor="middle">${tick(v)}</text>`;
  const beside = v =>
    `<text class="soft" x="${left - 7}" y="${Y(v) + 4}" text-anchor="end">${tick(v)}</text>`;
  const rulesY = () => ticks(ya, yb).map(v => across(v) + beside(v)).join("");
  return {X, Y, down, under, rulesY};
}
