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

// Places for the labels of points: beside, above or below, the first that covers neither a point
// nor a label; null if there is none: then only the point's title shows its name.
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

// A frame of w x h with room for axes, and functions from values to places in it.
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
