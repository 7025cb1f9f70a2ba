// -- rank over a set of columns

const RANKED = 25; // rows of that table at first
function overall() {
  if (!sets.length) return hide("overall");
  const list = options(sets.map((set, n) => [n, set.title]), 0);
  const select = `<label>over <select id="over">${list}</select></label>`;
  $("overall-controls").innerHTML = sets.length > 1 ? select : "";
  if (sets.length > 1) $("over").onchange = () => paintOverall(RANKED);
  paintOverall(RANKED);
}

function paintOverall(limit) {
  const set = sets[+($("over")?.value ?? 0)];
  const kinds = rankColumns(set);
  const left = Math.max(0, set.ranks.length - limit);
  $("overall-table").innerHTML =
    dataTable(kinds, set.ranks.slice(0, limit)) +
    (left ? `<p><button class="plain" id="all-ranks">Show ${left} more</button></p>` : "") +
    `<p class="soft small">Over ${esc(set.title)}. ${explanations(kinds)}</p>`;
  if (left) $("all-ranks").onclick = () => paintOverall(set.ranks.length);
}

// The kinds of columns (see dataTable) of the places over one set.
function rankColumns(set) {
  const count = set.ranks.length;
  return [
    {heading: "rank", number: true, cell: place => place.rank},
    {
      heading: "95% interval",
      style: "white-space:nowrap",
      cell: place => {
        const {low, high} = place;
        return `${rankStrip(place, count)} ${low === high ? low : `${low} to ${high}`}`;
      },
      explained: `Intervals are ${esc(set.basis)}, for all rows together.`,
    },
    {
      heading: "Checkpoint",
      cell: place => {
        const name = dot(colour(place.row), rows[place.row].label);
        return place.group === 1 ? `<strong>${name}</strong>` : name;
      },
      explained: "No row is shown to be better than those in bold. Two rows are compared on the " +
        "columns that both have; missing values are not filled in.",
    },
    {heading: "mean of its ranks", number: true, wide: true, cell: place => num(place.average, 2)},
    {
      heading: "should win",
      number: true,
      cell: place => `${num(place.win_rate, 0)}%`,
      explained: `"Should win" is the share of comparisons with the others that a row is expected ` +
        `to win, by Bradley and Terry's model.`,
    },
    {heading: "columns", number: true, wide: true, cell: place => place.columns},
  ];
}

// A rank's interval as a line and the rank as a dot, between rank 1 and the last one.
function rankStrip({row, rank, low, high}, count) {
  const W = 150;
  const X = v => count < 2 ? W / 2 : 8 + (W - 16) * (v - 1) / (count - 1);
  return `<svg class="hide-small" width="${W}" height="14" aria-hidden="true">` +
    `<line class="axis" x1="8" x2="${W - 8}" y1="7" y2="7"/>` +
    `<line x1="${X(low)}" x2="${X(high)}" y1="7" y2="7"` +
    ` style="stroke:${colour(row)};stroke-width:4;stroke-linecap:round"/>` +
    `<circle cx="${X(rank)}" cy="7" r="5" style="fill:${colour(row)}"/></svg>`;
}

// -- rank of each checkpoint in each main column

const MOST_CURVED = 12; // checkpoints in that chart
function ranks() {
  if (!main.length || measured.length < 2) return hide("ranks");
  const list = inOrder(measured.filter(row => meanRank[row.index] < NO_RANK)).slice(0, MOST_CURVED);
  const n = list.length;
  const left = 150, right = 190, top = 89, dy = 34;
  const room = Math.max(300, $("rank-chart").clientWidth - 30);
  const gaps = main.length - 1;
  const dx = gaps ? between((room - left - right - 40) / gaps, 92, 190) : 0;
  const w = left + 40 + dx * gaps + right;
  const h = top + dy * n + 10;
  const X = j => left + 40 + dx * j;
  const Y = v => top + dy * (v - 1) + 14;
  let body = main.map((k, j) => rankAxis(columns[k], X(j), top, h - 12, dx)).join("");
  for (let v = 1; v <= n; v++) {
    body += `<text class="soft" x="12" y="${Y(v) + 4}" text-anchor="end">${v}</text>`;
  }
  // Of each main column a map from a row to its place among those of the list; equals share one.
  const place = rank.map(ofColumn => {
    const having = list.filter(row => ofColumn.has(row.index));
    const isBefore = (a, b) => ofColumn.get(a.index) < ofColumn.get(b.index);
    return new Map(having.map(row =>
      [row.index, having.filter(other => isBefore(other, row)).length + 1]));
  });
  const drawn = list.map(row => {
    const points = [];
    place.forEach((ofColumn, j) => {
      if (ofColumn.has(row.index)) points.push({x: X(j), y: Y(ofColumn.get(row.index)), j});
    });
    return {row, points};
  });
  for (const {row, points} of drawn) body += rankCurve(row, points);
  body += namesWithin(drawn, w, h);
  let note = "";
  if (measured.length > n) {
    const words = `The ${n} checkpoints with the best mean rank of ${measured.length}.`;
    note = `<p class="soft small">${words}</p>`;
  }
  $("rank-chart").innerHTML = svg(w, h, body, "Rank of each checkpoint in each task") + note;
}

function rankAxis(column, x, top, bottom, dx) {
  const most = dx / 7.4; // letters between two axes
  const protocol = hasNamesake(column) ? protocolName(column) : "";
  const words = [taskName(column.task), column.dataset, column.heading, protocol].map((text, n) => {
    const shown = text.length > most ? text.slice(0, Math.floor(most) - 1) + "…" : text;
    return `<text class="${n ? "soft" : ""}" x="${x}" y="${18 + 15 * n}" text-anchor="middle"` +
      ` style="font-size:${n ? 11 : 12}px">${esc(shown)}</text>`;
  });
  return `<g><line class="axis" x1="${x}" x2="${x}" y1="${top}" y2="${bottom}"/>` +
    `${words.join("")}</g>`;
}

function rankCurve(row, points) {
  const ends = namedEnds(points);
  // A curve between neighbouring columns; where one is missing in between, it begins anew.
  let path = "";
  let before = null;
  for (const point of points) {
    if (before && point.j - before.j === 1) {
      const half = (before.x + point.x) / 2;
      path += `C${half} ${before.y} ${half} ${point.y} ${point.x} ${point.y}`;
    } else {
      path += `M${point.x} ${point.y}`;
    }
    before = point;
  }
  const color = colour(row.index);
  const style = `style="fill:${color};font-weight:600"`;
  const dots = points.map(point => {
    const k = main[point.j];
    const ofColumn = rank[point.j];
    const value = num(valueAt(k, row.index), 2);
    const words = `${esc(row.label)}: ${esc(columnLabel(columns[k]))} ${value}`;
    return `<circle cx="${point.x}" cy="${point.y}" r="5" style="fill:${color}">` +
      `<title>${words}, rank ${ofColumn.get(row.index)} of ${ofColumn.size}</title></circle>`;
  });
  const first = points[0];
  const last = points.at(-1);
  let end = "";
  if (ends.right) {
    end = `<text class="name" x="${last.x + 11}" y="${last.y + 4}" ${style}>${esc(cut(row.label, 24))}</text>`;
  }
  const begin = ends.left
    ? `<text class="name" x="${first.x - 12}" y="${first.y + 4}" text-anchor="end" ${style}>` +
      `${esc(cut(row.label, 16))}</text>`
    : "";
  return begin + `<g class="s" tabindex="-1"><path class="line" d="${path}" style="stroke:${color}"/>` +
    `${dots.join("")}${end}</g>`;
}

// Names stand outside of the outermost columns, where no curve is.
function namedEnds(points) {
  const isAlone = main.length === 1;
  return {left: points[0].j === 0, right: points.at(-1).j === main.length - 1 && !isAlone};
}

// The names of checkpoints whose curves reach neither side: beside their first point, where they
// cross no curve. The others' points say theirs when they are pointed at.
function namesWithin(drawn, w, h) {
  const pieces = drawn.flatMap(({points}) => points.slice(1).flatMap((point, n) =>
    point.j - points[n].j === 1 ? curvePieces(points[n], point) : []));
  const dots = drawn.flatMap(({points}) =>
    points.map(({x, y}) => [x - 6, y - 6, x + 6, y + 6]));
  const within = drawn.filter(({points}) => {
    const ends = namedEnds(points);
    return !ends.left && !ends.right;
  });
  const texts = within.map(({row}) => cut(row.label, 16));
  const at = within.map(({points}) => [points[0].x, points[0].y]);
  const free = placed(at, texts, w, h, [...pieces, ...dots]);
  return within.map(({row}, n) => {
    if (!free[n]) return "";
    const [left, top, text] = free[n];
    return `<text class="name" x="${left}" y="${top}"` +
      ` style="fill:${colour(row.index)};font-size:11px;font-weight:600">${esc(text)}</text>`;
  }).join("");
}

// Boxes around short pieces of the curve between two points of neighbouring columns.
const PIECES = 24;
function curvePieces(from, to) {
  const at = t => {
    // A cubic curve whose handles are half-way between both columns
    const half = (from.x + to.x) / 2;
    const [a, b, c, d] = [(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t ** 2 * (1 - t), t ** 3];
    return [a * from.x + (b + c) * half + d * to.x, (a + b) * from.y + (c + d) * to.y];
  };
  const points = Array.from({length: PIECES + 1}, (_, n) => at(n / PIECES));
  return points.slice(1).map(([x, y], n) => {
    const [before, above] = points[n];
    return [before, Math.min(y, above) - 2, x, Math.max(y, above) + 2];
  });
}
