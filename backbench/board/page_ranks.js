// -- rank over a set of columns

const RANKED = 25; // rows of that table at first
function overall() {
  if (!sets.length) return hide("overall");
  const list = sets.map((s, n) => [n, s.title]);
  $("overall-controls").innerHTML = sets.length < 2 ? ""
    : `<label>over <select id="over">${options(list, 0)}</select></label>`;
  if (sets.length > 1) $("over").onchange = () => paintOverall(RANKED);
  paintOverall(RANKED);
}

function paintOverall(limit) {
  const s = sets[+($("over")?.value ?? 0)], n = s.ranks.length;
  const right = `style="text-align:right"`;
  const lines = s.ranks.slice(0, limit).map(x => overallLine(x, n));
  const left = n - lines.length;
  $("overall-table").innerHTML =
    `<div class="frame"><table class="data"><thead><tr><th ${right}>rank</th>` +
    `<th>95% interval</th><th>Checkpoint</th><th class="hide-small" ${right}>mean of its ranks</th>` +
    `<th ${right}>should win</th><th class="hide-small" ${right}>columns</th></tr></thead>` +
    `<tbody>${lines.join("")}</tbody></table></div>` +
    (left > 0 ? `<p><button class="plain" id="all-ranks">Show ${left} more</button></p>` : "") +
    `<p class="soft small">Over ${esc(s.title)}. Intervals are ${esc(s.basis)}, for all rows ` +
    `together. No row is shown to be better than those in bold. Two rows are compared on the columns that ` +
    `both have; missing values are not filled in. "Should win" is the share of comparisons with the ` +
    `others that a row is expected to win, by Bradley and Terry's model.</p>`;
  if (left > 0) $("all-ranks").onclick = () => paintOverall(n);
}

function overallLine(x, n) {
  const r = rows[x.row], W = 150;
  const X = v => n < 2 ? W / 2 : 8 + (W - 16) * (v - 1) / (n - 1);
  const words = x.low === x.high ? String(x.low) : `${x.low} to ${x.high}`;
  const strip = `<svg class="hide-small" width="${W}" height="14" aria-hidden="true">` +
    `<line class="axis" x1="8" x2="${W - 8}" y1="7" y2="7"/>` +
    `<line x1="${X(x.low)}" x2="${X(x.high)}" y1="7" y2="7"` +
    ` style="stroke:${colour(r.i)};stroke-width:4;stroke-linecap:round"/>` +
    `<circle cx="${X(x.rank)}" cy="7" r="5" style="fill:${colour(r.i)}"/></svg>`;
  const name = `<span class="dot" style="--c:${colour(r.i)}"></span>${esc(r.label)}`;
  return `<tr><td class="n">${x.rank}</td><td style="white-space:nowrap">${strip} ${words}</td>` +
    `<td>${x.group === 1 ? `<strong>${name}</strong>` : name}</td>` +
    `<td class="n hide-small">${num(x.average, 2)}</td><td class="n">${num(x.win_rate, 0)}%</td>` +
    `<td class="n hide-small">${x.columns}</td></tr>`;
}

// -- rank of each checkpoint in each main column

function ranks() {
  if (!main.length || measured.length < 2) return hide("ranks");
  const list = measured
    .filter(r => meanRank[r.i] < NO_RANK)
    .sort((a, b) => order[a.i] - order[b.i])
    .slice(0, 12);
  const n = list.length, left = 150, right = 190, top = 74, dy = 34;
  const room = Math.max(300, $("rank-chart").clientWidth - 30);
  const dx = main.length > 1 ? between((room - left - right - 40) / (main.length - 1), 92, 190) : 0;
  const w = left + 40 + dx * (main.length - 1) + right, h = top + dy * n + 10;
  const X = j => left + 40 + dx * j, Y = v => top + dy * (v - 1) + 14;
  let body = main.map((k, j) => rankAxis(columns[k], X(j), top, h - 12, dx)).join("");
  for (let v = 1; v <= n; v++) {
    body += `<text class="soft" x="12" y="${Y(v) + 4}" text-anchor="end">${v}</text>`;
  }
  const place = rank.map(m => { // row -> its place among those of the list; equals share one
    const having = list.filter(r => m.has(r.i));
    const before = r => having.filter(q => m.get(q.i) < m.get(r.i)).length;
    return new Map(having.map(r => [r.i, before(r) + 1]));
  });
  for (const r of list) {
    const points = [];
    place.forEach((m, j) => {
      if (m.has(r.i)) points.push({x: X(j), y: Y(m.get(r.i)), j});
    });
    body += rankCurve(r, points);
  }
  let note = "";
  if (measured.length > n) {
    const words = `The ${n} checkpoints with the best mean rank of ${measured.length}.`;
    note = `<p class="soft small">${words}</p>`;
  }
  $("rank-chart").innerHTML = svg(w, h, body, "Rank of each checkpoint in each task") + note;
}

function rankAxis(c, x, top, bottom, dx) {
  const most = dx / 7.4; // letters between two axes
  const words = [taskName(c.task), c.dataset, metricName(c.metric)].map((s, q) => {
    const text = s.length > most ? s.slice(0, Math.floor(most) - 1) + "…" : s;
    return `<text class="${q ? "soft" : ""}" x="${x}" y="${18 + 15 * q}" text-anchor="middle"` +
      ` style="font-size:${q ? 11 : 12}px">${esc(text)}</text>`;
  });
  return `<g><line class="axis" x1="${x}" x2="${x}" y1="${top}" y2="${bottom}"/>` +
    `${words.join("")}</g>`;
}

function rankCurve(r, points) {
  // A curve between neighbouring columns; where one is missing in between, it begins anew.
  let path = "", before = null;
  for (const p of points) {
    if (before && p.j - before.j === 1) {
      const half = (before.x + p.x) / 2;
      path += `C${half} ${before.y} ${half} ${p.y} ${p.x} ${p.y}`;
    } else {
      path += `M${p.x} ${p.y}`;
    }
    before = p;
  }
  const style = `style="fill:${colour(r.i)};font-weight:600"`, begin = points[0], last = before;
  const dots = points.map(p => {
    const k = main[p.j], m = rank[p.j];
    const words = `${esc(r.label)}: ${esc(columnLabel(columns[k]))} ${num(valueAt(k, r.i), 2)}`;
    return `<circle cx="${p.x}" cy="${p.y}" r="5" style="fill:${colour(r.i)}">` +
      `<title>${words}, rank ${m.get(r.i)} of ${m.size}</title></circle>`;
  });
  let end = "";
  if (last.j === main.length - 1 && main.length > 1) {
    end = `<text x="${last.x + 11}" y="${last.y + 4}" ${style}>${esc(cut(r.label, 24))}</text>`;
  }
  return `<text x="${begin.x - 12}" y="${begin.y + 4}" text-anchor="end" ${style}>` +
    `${esc(cut(r.label, 16))}</text>` +
    `<g class="s" tabindex="-1"><path class="line" d="${path}" style="stroke:${colour(r.i)}"/>` +
    `${dots.join("")}${end}</g>`;
}
