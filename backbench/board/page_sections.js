// ---- figures, pictures, verdicts

function pictures() {
  if (!D.pictures.length) return hide("detections");
  $("pictures").innerHTML = D.pictures.map(p =>
    `<figure><img alt="${esc(p.alt)}" src="${p.src}" width="${p.width}" height="${p.height}"` +
    ` loading="lazy"><figcaption>${esc(p.title)}: ground truth left, detected right<div class="soft small">${esc(p.note)}</div></figcaption></figure>`,
  ).join("");
}

function figures() {
  if (!D.figures.length) return hide("figures");
  $("figure-list").innerHTML = D.figures.map(p =>
    `<figure><a href="#figures" data-full>` +
    `<img alt="${esc(p.title)}" src="${p.src}" width="${p.width}" height="${p.height}"` +
    ` loading="lazy"></a>` +
    `<figcaption>${esc(p.title)}</figcaption></figure>`,
  ).join("");
  $("figure-list").querySelectorAll("[data-full]").forEach(a => a.onclick = e => {
    e.preventDefault();
    const style = a.closest("figure").style;
    style.gridColumn = style.gridColumn ? "" : "1 / -1";
  });
}

function reproduction() {
  if (!D.judged.length) return hide("reproduction");
  const heads = ["measured", "published", "tolerance"]
    .map(name => `<th style="text-align:right">${name}</th>`);
  const lines = D.judged.map(j => {
    const small = (size, text) => `<div class="soft" style="font-size:${size}rem">${text}</div>`;
    const interval = j.low == null ? "" : small(".8", `${num(j.low, 2)} to ${num(j.high, 2)}`);
    const tone = j.verdict === "within" ? "pos" : "neg";
    const others = j.others.map(other => small(".76", esc(other))).join("");
    return `<tr><td>${esc(j.name)}</td><td>${esc(j.column)}${small(".76", esc(j.key))}</td>` +
      `<td class="n">${num(j.measured, 2)}${interval}</td><td class="n">${num(j.published, 2)}</td>` +
      `<td class="n">±${j.tolerance}</td><td><span class="tag ${tone}">${esc(j.said)}</span>` +
      `${others}</td>` +
      `<td class="soft">${esc(j.hardware)}</td></tr>`;
  });
  $("judged").innerHTML =
    `<div class="frame"><table class="data"><thead><tr><th>Checkpoint</th><th>Column</th>` +
    `${heads.join("")}<th>verdict</th><th>hardware</th></tr></thead>` +
    `<tbody>${lines.join("")}</tbody></table></div>` +
    D.claims.map(claim => `<p class="small">${esc(claim)}</p>`).join("");
}

// ---- words around them

const SECTIONS = {
  table: "Leaderboard",
  overall: "Ranks",
  ranks: "Rank per task",
  transfer: "Task against task",
  compare: "Compare two",
  curves: "Pretraining",
  figures: "Figures",
  detections: "Detections",
  reproduction: "Reproduction",
  notes: "How to read",
};
const KEY = {
  best: "<strong class='pos'>Bold green</strong>: above every other checkpoint by a paired test. ",
  tied: "<span style='text-decoration:underline dotted 2px var(--best);text-underline-offset:3px'>" +
    "Dotted</span>: no test separates it from the best. ",
  untested: "<em>Italic</em>: highest, but not tested. ",
  once: "<span class='v once'><b>Ring</b></span>: best of one training each; a second training may " +
    "turn it round. ",
  unbacked: "<span style='color:var(--soft)'>Pale</span>: nothing was kept to compute it again. ",
  unsettled: "<span class='v unsettled'><b>Dagger</b></span>: not ranked; the number's note says why. ",
};

function words() {
  const n = measured.length, marks = new Set(D.cells.flatMap(table => table.mark));
  const published = rows.length > n ? `, with ${rows.length - n} published rows beside them` : "";
  const counts = [
    plural(n, "checkpoint"),
    plural(D.numbers, "measured number"),
    plural(columns.filter(c => c.measured).length, "column"),
  ];
  $("answer").textContent = D.answer;
  $("summary").textContent =
    `${counts.join(", ")}${published}.${D.newest && ` Newest number: ${D.newest}.`}` +
    `${labsOfAll.length === 1 ? ` Measured by ${labsOfAll[0]}.` : ""}` +
    ` Page of backbench ${D.version}.`;
  const key = Object.keys(KEY).filter(mark => marks.has(mark)).map(mark => KEY[mark]).join("");
  $("key").innerHTML =
    `Percent; ± is half the 95% interval, the bar under a number shows it within its column's ` +
    `range. ${key}Rows are ordered by their rank over all columns (see below). Click a heading to ` +
    `sort by it. Click a number to see its origin and the command that measures it again. Arrow ` +
    `keys move between numbers; / goes to the filter.`;
  if (D.problems.length) {
    const list = D.problems.slice(0, 200).map(p => `<li>${esc(p)}</li>`).join("");
    $("warnings").innerHTML =
      `<details class="warn"><summary>${plural(D.problems.length, "line")} in the results need ` +
      `attention</summary><ul class="small">${list}</ul></details>`;
  }
  $("reading").innerHTML =
    `<p>A row is one set of weights, named by its digest: the same weights under two names are one ` +
    `row. A column is one way to measure: numbers made by another protocol, detection engine or ` +
    `split stand in another column, so all numbers of one column can be compared.</p>` +
    `<p>An average is shown only if all twelve of its datasets were measured. A dash means that the ` +
    `value is undefined (an average precision without ground truth); an empty field was not run.</p>` +
    `<p>Published rows are copied from the papers' tables. They are never ranked, averaged or ` +
    `tested together with measured ones.</p>`;
  $("nav").innerHTML =
    Object.entries(SECTIONS).map(([id, text]) => `<a href="#${id}">${text}</a>`).join("") +
    `<button class="plain" id="theme" aria-label="Switch between light and dark">` +
    `Light / dark</button>`;
  $("theme").onclick = () => {
    const chosen = document.documentElement.dataset.theme;
    const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  };
}

// ---- the page

listenToTable();
tableControls();
columnControls();
$("detail").addEventListener("click", e => { if (e.target === $("detail")) $("detail").close(); });
words();
draw();
pictures();
figures();
reproduction();

// Charts of a large board are drawn when they come into view, or before printing.
const later = new Map([
  ["overall", overall], ["ranks", ranks], ["transfer", transfer], ["compare", compare], ["curves", curves],
]);
function paintSection(id) {
  const paint = later.get(id);
  later.delete(id);
  paint?.();
}
const paintAll = () => [...later.keys()].forEach(paintSection);
if (measured.length * columns.length > 5000) {
  const seen = new IntersectionObserver(list => list.forEach(e => {
    if (!e.isIntersecting) return;
    seen.unobserve(e.target);
    paintSection(e.target.id);
  }), {rootMargin: "300px"});
  [...later.keys()].forEach(id => seen.observe($(id)));
  addEventListener("beforeprint", paintAll);
  // Drawing a chart moves everything below it, so all are drawn before the page follows a link.
  $("nav").addEventListener("click", e => e.target.closest("a") && paintAll());
} else {
  paintAll();
}

const isDrawn = id => !later.has(id) && !$(id).hidden;
let pause;
addEventListener("resize", () => {
  clearTimeout(pause);
  pause = setTimeout(() => {
    sideways();
    if (isDrawn("ranks")) ranks();
    if (isDrawn("transfer")) paintTransfer();
    if (isDrawn("curves")) paintCurves();
  }, 150);
});
