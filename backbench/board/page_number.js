// ---- provenance of one number

const FIRST = ["command", "verified", "chosen", "recipe", "manifest", "code", "versions", "hardware", "recorded",
  "run"];
const STANDING = {
  best: "Above every other checkpoint here by a paired test.",
  tied: "No paired test separates this value from the highest in its column.",
  untested: "Highest here, but not tested: predictions were not kept.",
  once: "Best of one training each: nobody knows how far a second training would move it.",
  unbacked: "Nothing was kept that this value follows from: it takes no part in tests and ranks.",
  unsettled: "Not ranked: its note says why.",
};

// The value that a text was written from: JSON if it begins like JSON and was not cut short.
function decoded(text) {
  try {
    return /^[{[]/.test(text) ? JSON.parse(text) : text;
  } catch {
    return text;
  }
}

function block(v) {
  const isGroup = typeof v === "object" && v !== null;
  return isGroup ? `<pre>${esc(JSON.stringify(v, null, 1))}</pre>` : esc(v);
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

// One measurement behind a number. Its texts are places in the list of all texts, and so are the
// lists of keys, which most measurements share.
function part(n, several) {
  const {parts, keys, texts} = readOrigins();
  const p = record(parts, n), about = {};
  keys[p.keys].forEach((key, j) => about[texts[key]] = decoded(texts[p.texts[j]]));
  const first = FIRST.filter(key => key in about);
  const others = Object.keys(about).filter(key => !FIRST.includes(key)).sort();
  const list = [...first, ...others].map(key => described(key, about)).join("");
  const title = several ? `Seed ${p.seed}: ${num(p.value, 2)}` : "Where it comes from";
  return `<h3 style="margin:1rem 0 0;font-size:.95rem">${title}</h3>` +
    `<dl><dt>split, seed</dt><dd>${esc(texts[p.split])}, ${p.seed}</dd>${list}</dl>`;
}

function source(r, parts) {
  if (r.published) return "<p>Printed in the paper; not measured here.</p>";
  if (parts.length) return parts.map(n => part(n, parts.length > 1)).join("");
  return "<p class='soft'>Computed from the numbers of its row.</p>";
}

function detail(k, i) {
  const c = columns[k], r = rows[i], {value, low, high, mark, note, parts} = cell[k].get(i);
  let interval = "";
  if (low != null) {
    const words = `95% interval ${num(low, 2)} to ${num(high, 2)}`;
    interval = ` <span class="soft" style="font-size:1rem;font-weight:400">${words}</span>`;
  }
  const said = STANDING[mark] ? `<p>${STANDING[mark]}</p>` : "";
  const kind = r.published ? "published row" : "checkpoint";
  $("detail").innerHTML =
    `<div class="head"><div><div class="soft small">${esc(columnLabel(c))}</div>` +
    `<div id="detail-title"><strong>${esc(r.label)}</strong></div></div>` +
    `<button class="plain" id="close" autofocus>Close</button></div>` +
    `<div class="body"><div class="big">${num(value, 2)}${interval}</div>` +
    `${said}${note ? `<p class="soft">${esc(D.notes[note])}</p>` : ""}` +
    `<dl><dt>column</dt><dd><code>${esc(c.name)}</code></dd>` +
    `${c.noise && !r.published ? `<dt>training again</dt><dd>${esc(c.noise)}</dd>` : ""}` +
    `<dt>${kind}</dt><dd><code>${esc(r.checkpoint)}</code></dd></dl>${source(r, parts)}</div>`;
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
    getSelection().selectAllChildren(pre);
    b.textContent = "Selected";
  }
}
