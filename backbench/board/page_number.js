// ---- provenance of one number

// The keys that stand first; the others follow by name.
const FIRST = [
  "command", "verified", "chosen", "recipe", "manifest", "code", "versions", "hardware",
  "recorded", "run",
];

// The value that a text was written from: JSON if it begins like JSON and was not cut short.
function decoded(text) {
  try {
    return /^[{[]/.test(text) ? JSON.parse(text) : text;
  } catch {
    return text;
  }
}

function block(value) {
  const isGroup = typeof value === "object" && value !== null;
  return isGroup ? `<pre>${esc(JSON.stringify(value, null, 1))}</pre>` : esc(value);
}

function described(key, about) {
  if (key === "cwd") return ""; // it stands with the command
  if (key === "command") {
    const cd = about.cwd ? `cd ${esc(about.cwd)}\n` : "";
    return `<dt>Measure it again</dt><dd><pre class="cmd">${cd}${esc(about.command)}</pre>` +
      `<button class="plain copy">Copy</button></dd>`;
  }
  let value = about[key];
  if (key === "recorded") {
    value = new Date(1000 * value).toISOString().replace("T", " ").slice(0, 19) + " UTC";
  }
  return `<dt>${esc(key.replace(/_/g, " "))}</dt><dd>${block(value)}</dd>`;
}

// The n-th measurement. What it says is in the list of all texts, which many measurements share.
function part(n, several) {
  const {parts, keys, texts} = readOrigins();
  const one = record(parts, n);
  const about = {};
  keys[one.keys].forEach((key, j) => about[texts[key]] = decoded(texts[one.texts[j]]));
  const first = FIRST.filter(key => key in about);
  const others = Object.keys(about).filter(key => !FIRST.includes(key)).sort();
  const list = [...first, ...others].map(key => described(key, about)).join("");
  const title = several ? `Seed ${one.seed}: ${num(one.value, 2)}` : "Where it comes from";
  return `<h3 style="margin:1rem 0 0;font-size:.95rem">${title}</h3>` +
    `<dl><dt>split, seed</dt><dd>${esc(texts[one.split])}, ${one.seed}</dd>${list}</dl>`;
}

function source(row, parts) {
  if (row.published) return "<p>Printed in the paper; not measured here.</p>";
  if (parts.length) return parts.map(n => part(n, parts.length > 1)).join("");
  return "<p class='soft'>Computed from the numbers of its row.</p>";
}

function detail(k, index) {
  const column = columns[k];
  const row = rows[index];
  const {value, low, high, mark, note, parts} = cells[k].get(index);
  let interval = "";
  if (low != null) {
    const words = `95% interval ${fromTo(low, high)}`;
    interval = ` <span class="soft" style="font-size:1rem;font-weight:400">${words}</span>`;
  }
  const said = MARKS[mark] ? `<p>${MARKS[mark].detail}</p>` : "";
  const remark = note ? `<p class="soft">${esc(DATA.notes[note])}</p>` : "";
  const again = column.noise && !row.published
    ? `<dt>training again</dt><dd>${esc(column.noise)}</dd>`
    : "";
  const kind = row.published ? "published row" : "checkpoint";
  $("detail").innerHTML =
    `<div class="head"><div><div class="soft small">${esc(columnLabel(column))}</div>` +
    `<div id="detail-title"><strong>${esc(row.label)}</strong></div></div>` +
    `<button class="plain" id="close" autofocus>Close</button></div>` +
    `<div class="body"><div class="big">${num(value, 2)}${interval}</div>${said}${remark}` +
    `<dl><dt>column</dt><dd><code>${esc(column.name)}</code></dd>${again}` +
    `<dt>${kind}</dt><dd><code>${esc(row.checkpoint)}</code></dd></dl>${source(row, parts)}</div>`;
  $("close").onclick = () => $("detail").close();
  $("detail").querySelectorAll(".copy").forEach(b => b.onclick = () => copy(b));
  $("detail").showModal();
}

async function copy(b) {
  const pre = b.previousElementSibling;
  try {
    await navigator.clipboard.writeText(pre.textContent);
    b.textContent = "Copied";
  } catch {
    // A browser may refuse: then the command is selected, to be copied by hand.
    getSelection().selectAllChildren(pre);
    b.textContent = "Selected";
  }
}
