// ---- figures, pictures, verdicts

function pictures() {
  if (!DATA.pictures.length) return hide("detections");
  $("pictures").innerHTML = DATA.pictures.map(picture =>
    `<figure>${image(picture, picture.alt)}` +
    `<figcaption>${esc(picture.title)}: ground truth left, detected right` +
    `<div class="soft small">${esc(picture.note)}</div></figcaption></figure>`,
  ).join("");
}

// Width and height give an image its room before it is read in.
const image = ({src, width, height}, alt) =>
  `<img alt="${esc(alt)}" src="${src}" width="${width}" height="${height}" loading="lazy">`;

function figures() {
  if (!DATA.figures.length) return hide("figures");
  $("figure-list").innerHTML = DATA.figures.map(figure =>
    `<figure><a href="#figures" data-full>${image(figure, figure.title)}</a>` +
    `<figcaption>${esc(figure.title)}</figcaption></figure>`,
  ).join("");
  // A click spreads a figure over the whole width, and back.
  $("figure-list").querySelectorAll("[data-full]").forEach(a => a.onclick = e => {
    e.preventDefault();
    const {style} = a.closest("figure");
    style.gridColumn = style.gridColumn ? "" : "1 / -1";
  });
}

// The kinds of columns (see dataTable) of the verdicts on published numbers.
const VERDICT_COLUMNS = [
  {heading: "Checkpoint", cell: one => esc(one.name)},
  {heading: "Column", cell: one => `${esc(one.column)}${small(".76", esc(one.key))}`},
  {
    heading: "measured",
    number: true,
    cell: one => {
      const interval = one.low == null ? "" : small(".8", fromTo(one.low, one.high));
      return `${num(one.measured, 2)}${interval}`;
    },
  },
  {heading: "published", number: true, cell: one => num(one.published, 2)},
  {heading: "tolerance", number: true, cell: one => `±${one.tolerance}`},
  {
    heading: "verdict",
    cell: one => {
      const tone = one.verdict === "within" ? "pos" : "neg";
      const others = one.others.map(other => small(".76", esc(other)));
      return `<span class="tag ${tone}">${esc(one.said)}</span>${others.join("")}`;
    },
  },
  {heading: "hardware", soft: true, cell: one => esc(one.hardware)},
];

function reproduction() {
  if (!DATA.judged.length) return hide("reproduction");
  $("judged").innerHTML = dataTable(VERDICT_COLUMNS, DATA.judged) +
    DATA.claims.map(claim => `<p class="small">${esc(claim)}</p>`).join("");
}

// ---- words around them

// The sections of the page and their names in the navigation
const SECTIONS = {
  table: "Leaderboard",
  overall: "Ranks",
  ranks: "Rank per task",
  transfer: "Task against task",
  compare: "Compare two",
  labels: "Labels needed",
  layers: "Layers",
  errors: "Errors",
  curves: "Pretraining",
  figures: "Figures",
  detections: "Detections",
  reproduction: "Reproduction",
  notes: "How to read",
};
const MOST_PROBLEMS = 200; // lines in the list

function header() {
  const count = measured.length;
  const counts = [
    plural(count, "checkpoint"),
    plural(DATA.numbers, "measured number"),
    plural(measuredColumns.length, "column"),
  ];
  const printed = rows.length - count;
  const published = printed ? `, with ${printed} published rows beside them` : "";
  const sentences = [`${counts.join(", ")}${published}.`];
  if (DATA.newest) sentences.push(`Newest number: ${DATA.newest}.`);
  if (labsOfAll.length === 1) sentences.push(`Measured by ${labsOfAll[0]}.`);
  sentences.push(`Page of backbench ${DATA.version}.`);
  const answer = DATA.answer.map(sentence => `<p>${withCommands(sentence)}</p>`);
  $("answer").innerHTML = answer.join("");
  $("summary").textContent = sentences.join(" ");
  if (DATA.problems.length) {
    const list = DATA.problems.slice(0, MOST_PROBLEMS).map(text => `<li>${esc(text)}</li>`);
    $("warnings").innerHTML =
      `<details class="warn"><summary>${plural(DATA.problems.length, "line")} in the results ` +
      `need attention</summary><ul class="small">${list.join("")}</ul></details>`;
  }
}

function sectionLinks() {
  const links = Object.entries(SECTIONS).map(([id, text]) => `<a href="#${id}">${text}</a>`);
  $("nav").innerHTML = links.join("") +
    `<button class="plain" id="theme" aria-label="Switch between light and dark">` +
    `Light / dark</button>`;
  $("theme").onclick = () => {
    const chosen = document.documentElement.dataset.theme;
    const byDefault = matchMedia("(prefers-color-scheme: dark)").matches;
    const isDark = chosen ? chosen === "dark" : byDefault;
    document.documentElement.dataset.theme = isDark ? "light" : "dark";
  };
}

function explanation() {
  const used = new Set(DATA.cells.flatMap(table => table.mark));
  const marks = Object.keys(MARKS).filter(mark => used.has(mark));
  const key = marks.map(mark => MARKS[mark].key).join("");
  const rowOrder = sets.length === 0 ? "" :
    "Rows are ordered by their rank over all columns (see below); those with numbers in fewer than " +
    "a quarter of the columns follow.";
  $("key").innerHTML =
    `Percent; ± is half the 95% interval, the bar under a number shows it within its column's ` +
    `range. ${key}${rowOrder} Click a heading to sort by it. Click a number to see its origin and ` +
    `the command that measures it again. Arrow keys move between numbers; / goes to the filter.`;
  const isFast = rows.some(row => row.label.endsWith(" (fast)"));
  $("reading").innerHTML =
    `<p>A row is one set of weights, named by its digest: the same weights under two names are one ` +
    `row. A column is one way to measure: numbers made by another protocol, detection engine or ` +
    `split stand in another column, so all numbers of one column can be compared.</p>` +
    (isFast ? `<p>(fast): pretrained with --fast, so not to the letter of the paper's recipe.</p>` : "") +
    `<p>An average is shown only if all twelve of its datasets were measured. A dash means that the ` +
    `value is undefined (an average precision without ground truth); an empty field was not run.</p>` +
    `<p>Published rows are copied from the papers' tables. They are never ranked, averaged or ` +
    `tested together with measured ones.</p>`;
}

// ---- the page

listenToTable();
taskControls();
publishedControls();
columnControls();
$("detail").addEventListener("click", e => { if (e.target === $("detail")) $("detail").close(); });
header();
sectionLinks();
explanation();
draw();
pictures();
figures();
reproduction();

// Charts of a large board are drawn when they come into view, or before printing.
const LARGE = 5000; // rows times columns
const PAINTED = {
  overall, ranks, transfer, compare, labels: labelCurves, layers, errors, curves,
};
const later = new Map(Object.entries(PAINTED));
function paintSection(id) {
  const paint = later.get(id);
  later.delete(id);
  paint?.();
}
const paintAll = () => [...later.keys()].forEach(paintSection);
if (measured.length * columns.length > LARGE) {
  const seen = new IntersectionObserver(list => list.forEach(entry => {
    if (!entry.isIntersecting) return;
    seen.unobserve(entry.target);
    paintSection(entry.target.id);
  }), {rootMargin: "300px"});
  [...later.keys()].forEach(id => seen.observe($(id)));
  addEventListener("beforeprint", paintAll);
  // Drawing a chart moves everything below it, so all are drawn before the page follows a link.
  $("nav").addEventListener("click", e => e.target.closest("a") && paintAll());
} else {
  paintAll();
}

// The table and charts that depend on the window's width follow it, once it is still.
const isDrawn = id => !later.has(id) && !$(id).hidden;
const STILL = 150; // milliseconds
let pause;
addEventListener("resize", () => {
  clearTimeout(pause);
  pause = setTimeout(() => {
    sideways();
    if (isDrawn("ranks")) ranks();
    if (isDrawn("transfer")) paintTransfer();
    if (isDrawn("labels")) paintLabelCurves();
    if (isDrawn("layers")) paintLayers();
    if (isDrawn("errors")) paintErrors();
    if (isDrawn("curves")) paintCurves();
  }, STILL);
});
