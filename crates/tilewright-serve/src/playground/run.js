// Asking, and showing what came back.
const PRESETS = JSON.parse($("presets").textContent);
let asking = null;

// The body as text: what was typed as JSON goes out as it was typed.
function bodyText() {
  const text = $("state").value;
  let state;
  if (mode("state-mode") === "json") {
    try { J.parse(text); } catch (error) { throw new SyntaxError(`the state is not JSON: ${error.message}`); }
    state = text.trim();
  } else state = JSON.stringify(text);
  let asked;
  if (mode("questions-mode") === "json") {
    try { J.parse($("questions").value); } catch (error) { throw new SyntaxError(`the questions are not JSON: ${error.message}`); }
    asked = $("questions").value.trim();
  } else asked = J.write(formNode());
  const parts = [`"state": ${state}`, `"questions": ${asked}`];
  for (const name of ["model", "lang"]) {
    const value = $(name).value.trim();
    if (value) parts.push(`"${name}": ${JSON.stringify(value)}`);
  }
  for (const name of ["min_confidence", "max_len", "head_max_len"]) {
    const value = $(name).value.trim();
    // Something that is no number goes out as a text, and the server says what it thinks of it.
    if (value) parts.push(`"${name}": ${/^-?\d+(\.\d+)?$/.test(value) ? value.replace(/^(-?)0+(?=\d)/, "$1") : JSON.stringify(value)}`);
  }
  return `{${parts.join(", ")}}`;
}

const address = (what = "systemone") => new URL(`/${$("dialect").value}/v1/${what}`, location.href).href;

async function run(event) {
  event?.preventDefault();
  if (asking) return;
  let body;
  try { body = bodyText(); } catch (error) { return showError("This cannot be sent yet", [error.message]); }
  const headers = { "Content-Type": "application/json" };
  const key = $("key").value.trim();
  if (key) headers.Authorization = `Bearer ${key}`;
  asking = new AbortController();
  $("run").setAttribute("aria-disabled", "true");
  $("run").textContent = "Running";
  say("asking the model");
  const began = performance.now();
  try {
    const response = await fetch(address($("explain").checked ? "explain" : "systemone"), { method: "POST", headers, body, signal: asking.signal, cache: "no-store", credentials: "omit" });
    const text = await response.text(), took = performance.now() - began;
    $("raw-text").textContent = text.slice(0, 2e6);
    $("raw").hidden = false;
    let node;
    try { node = J.parse(text); } catch (error) { node = undefined; }
    if (!response.ok) showRefusal(response, node, text);
    else if (!node) showError("The answer is not JSON", [text.slice(0, 500)]);
    else {
      const inside = Number(response.headers.get("x-inference-time-ms"));
      const explained = J.get(node, "explanations");
      showAnswers(explained ? J.get(node, "result") : node, took, inside, J.get(node, "model"));
      if (explained?.k === "a") $("tokens").append(...explained.v.map(rowOf));
    }
  } catch (error) {
    showError("No answer", [`${error.message}. Is the server still running?`]);
  } finally {
    asking = null;
    $("run").removeAttribute("aria-disabled");
    $("run").textContent = "Run";
  }
}

function showError(title, lines, hint) {
  const box = el("div", { class: "error" }, el("b", {}, title));
  if (lines.length === 1) box.append(el("div", {}, lines[0]));
  else box.append(el("ul", {}, ...lines.map(l => el("li", {}, l))));
  if (hint) box.append(el("div", { class: "note" }, hint));
  $("error").replaceChildren(box);
  $("answers").replaceChildren();
  $("tokens").replaceChildren();
  say(title);
  box.scrollIntoView({ block: "nearest" });
}

const HINTS = {
  401: "Write the key into the field “API key”.", 404: "This server does not know this path; choose the other dialect.", 408: "The request was too slow on its way.",
  413: "Shorten the state, or ask fewer questions with fewer options.", 429: "This key has sent as many requests as it may.", 500: "The cause is in the server's log.",
  503: "The server has more to do than it can queue. Try again in a moment.", 504: "The server ran out of time. Try again, or ask less at once.",
};

// Every spelling of an error: a text, a list of places and words, a kind and a message.
function showRefusal(response, node, text) {
  const detail = J.get(node, "detail") ?? J.get(node, "error") ?? node;
  let lines;
  if (detail?.k === "a") lines = detail.v.map(d => {
    const where = (J.get(d, "loc")?.v ?? []).map(J.plain).filter((w, i) => i > 0 || w !== "body").join(" \u203a ");
    const words = J.plain(J.get(d, "msg") ?? d);
    return where ? `${where}: ${words}` : words;
  });
  else lines = [J.plain(J.get(detail, "message") ?? detail) || text.slice(0, 500) || "without a word of explanation"];
  const after = response.headers.get("retry-after");
  const hint = [HINTS[response.status], after && `The server asks to wait ${after} s.`].filter(Boolean).join(" ");
  showError(`Refused: ${response.status} ${response.statusText}`.trim(), lines, hint);
}

const percent = p => `${(100 * p).toFixed(p > 0 && p < 0.001 ? 2 : 1)} %`;

function bars(rows) {
  const best = Math.max(...rows.map(r => r[1]));
  return el("ul", { class: "bars" }, ...rows.map(([name, p]) => {
    const filled = el("i");
    filled.style.width = `${100 * Math.min(1, Math.max(0, p))}%`;
    return el("li", p === best ? { class: "best" } : {}, el("span", { class: "name" }, name),
      el("span", { class: "bar", "aria-hidden": "true" }, filled), el("span", { class: "pct" }, percent(p)));
  }));
}

function answerCard(id, answer) {
  const type = J.plain(J.get(answer, "type")), rows = [];
  let value = "";
  const legend = J.get(answer, "legend");
  for (const [key, p] of J.get(answer, "probabilities")?.v ?? []) {
    const words = J.get(legend, key);
    rows.push([words ? `${key}: ${J.plain(words)}` : key, J.number(p) ?? 0]);
  }
  if (type === "choice") value = J.plain(J.get(answer, "choice"));
  if (type === "score") value = J.plain(J.get(answer, "score"));
  if (type === "noul") {
    const yes = J.number(J.get(answer, "noul")) ?? 0;
    value = yes >= 0.5 ? "yes" : "no";
    rows.push(["yes", yes], ["no", 1 - yes]);
  }
  const head = el("div", { class: "head" }, el("h3", {}, id, " ", el("span", { class: "kind" }, type)), el("span", { class: "value" }, value));
  if (J.get(answer, "low_confidence")?.v === "true" || J.plain(J.get(answer, "abstention")) === "abstained") head.append(el("span", { class: "flag" }, "below the least confidence: abstained"));
  const facts = el("p", { class: "facts" });
  const names = { confidence: "confidence", answer_confidence: "confidence of the answer", x_jev_confidence: "confidence as Jev counts it", abstention_threshold: "least confidence" };
  for (const [key, words] of Object.entries(names)) {
    const found = J.get(answer, key);
    if (found) facts.append(el("span", {}, `${words} `, el("b", {}, J.plain(found))));
  }
  return el("article", { class: "answer", "aria-label": `${id}: ${value}` }, head, bars(rows), facts);
}

function showAnswers(node, took, inside, model) {
  $("error").replaceChildren();
  const answers = J.get(node, "answers")?.v ?? [];
  const routing = J.get(node, "routing");
  const top = el("p", { class: "facts" }, el("span", {}, "model ", el("b", {}, J.plain(J.get(routing, "model") ?? model ?? J.get(node, "model")))),
    el("span", {}, "here and back ", el("b", {}, `${took.toFixed(took < 10 ? 1 : 0)} ms`)));
  if (inside > 0) top.append(el("span", {}, "of which the model ", el("b", {}, `${inside} ms`)));
  const reason = J.get(routing, "reason");
  if (reason) top.append(el("span", {}, `because: ${J.plain(reason)}`));
  $("answers").replaceChildren(top, ...answers.map(p => answerCard(p[0], p[1])));
  showTokens(J.get(node, "usage"), answers.length);
  say(answers.length === 1 ? "one answer" : `${answers.length} answers`);
  if (innerWidth < 992) $("results").scrollIntoView();
}

// A stacked bar with its words; parts are [name, tokens, class].
function stack(title, parts, note) {
  const all = parts.reduce((sum, p) => sum + p[1], 0) || 1;
  const bar = el("div", { class: "bar", "aria-hidden": "true" }, ...parts.map(p => {
    const piece = el("i", p[2] ? { class: p[2] } : {});
    piece.style.width = `${100 * p[1] / all}%`;
    return piece;
  }));
  const words = parts.map(p => el("span", {}, el("i", { class: `swatch ${p[2] ?? ""}`, "aria-hidden": "true" }), ` ${p[1].toLocaleString("en")} ${p[0]}`));
  return el("div", { class: "answer" }, el("h3", {}, title), bar, el("p", { class: "facts" }, ...words), ...(note ? [el("p", { class: "note" }, note)] : []));
}

function showTokens(usage, count) {
  const number = key => J.number(J.get(usage, key)), found = [];
  const input = number("input_tokens"), state = number("state_tokens"), dropped = number("state_tokens_dropped") ?? 0;
  if (state !== undefined) {
    const cut = (J.get(usage, "truncated_questions")?.v ?? []).map(J.plain), all = count * state;
    found.push(stack("Tokens of the state", [["read", state - dropped, "third"], ["left out", dropped, "cut"]].filter(p => p[1] > 0 || p[0] === "read"),
      dropped ? `The row of ${cut.join(", ")} had no room for all of it. Raise the tokens of a row, or shorten the state.` : "Every question has read all of it."));
    if (!dropped && input >= all) found.push(stack("Tokens of all rows", [["of the state", all, "third"], ["of questions, options and marks", input - all]], `${count === 1 ? "One row" : `${count} rows`}: the state is read once for each question.`));
    else found.push(stack("Tokens of all rows", [["in all", input]], `${count === 1 ? "One row" : `${count} rows`}, each with as much of the state as it has room for.`));
    for (const [id, options] of J.get(usage, "options")?.v ?? []) {
      const per = J.get(options, "tokens_per_option");
      found.push(el("p", { class: "error" }, el("b", {}, `${id}: options look the same to the model. `),
        `Of ${J.plain(J.get(options, "total"))} options only ${J.plain(J.get(options, "distinct"))} differ${per && per.v !== "null" ? ` after a cut to ${J.plain(per)} tokens each` : ""}. Raise the tokens of a question, or shorten the options.`));
    }
  } else if (input !== undefined) {
    found.push(stack("Tokens of all rows", [["in all", input]], "This dialect does not tell what was cut; the dialect laya does."));
  }
  $("tokens").replaceChildren(...found);
}

// One question's row as the model reads it: how many tokens of each part, what was cut, and every token.
function rowOf(explained) {
  const options = J.get(explained, "options")?.v ?? [], parts = J.get(explained, "segments")?.v ?? [];
  const name = segment => {
    const part = J.plain(J.get(segment, "part")), at = J.number(J.get(segment, "option"));
    return part === "option" ? `option ${J.plain(J.get(options[at], "key"))}` : part;
  };
  const count = key => segment => J.number(J.get(segment, key)) ?? 0, kept = count("kept"), of = count("of"), skipped = count("skipped");
  const held = segment => J.get(segment, "ids")?.v.length ?? kept(segment);
  const sum = wanted => parts.filter(s => wanted.includes(J.plain(J.get(s, "part")))).reduce((all, s) => all + held(s), 0);
  const state = parts.find(s => J.plain(J.get(s, "part")) === "state");
  const lost = state ? of(state) - kept(state) : 0;
  const box = stack(`Row of ${J.plain(J.get(explained, "question"))}`, [["instructions", sum(["instructions"])], ["options", sum(["option"]), "other"], ["state", sum(["state"]), "third"],
    ["marks", sum(["special"]), "fourth"], ["left out of the state", lost, "cut"]].filter(p => p[1] > 0));
  const cuts = parts.filter(s => kept(s) < of(s)).map(s => {
    const gone = of(s) - kept(s), where = skipped(s) >= gone ? "its beginning" : skipped(s) > 0 ? "its beginning and its end" : "its end";
    return el("li", {}, `${name(s)}: ${kept(s)} of ${of(s)} tokens; ${gone} are left out at ${where}`);
  });
  if (cuts.length) box.append(el("ul", { class: "cuts" }, ...cuts));
  const pieces = el("p", { class: "pieces" });
  for (const segment of parts) {
    const group = el("span", { class: `part ${J.plain(J.get(segment, "part"))}`, title: name(segment) });
    for (const token of J.get(segment, "tokens")?.v ?? []) group.append(el("span", { class: "piece" }, J.plain(token)), " ");
    pieces.append(group);
  }
  box.append(el("details", {}, el("summary", {}, "Every token"), pieces));
  return box;
}

function program(kind) {
  const text = bodyText(), key = $("key").value.trim();
  if (kind === "curl") {
    const shown = J.write(J.parse(text));
    const auth = key ? ` \\\n  -H "Authorization: Bearer $TILEWRIGHT_KEY"` : "";
    return `curl -sS '${address()}' \\\n  -H 'Content-Type: application/json'${auth} \\\n  --data-binary @- <<'END_OF_REQUEST'\n${shown}\nEND_OF_REQUEST\n`;
  }
  const auth = key ? `, "Authorization": "Bearer " + os.environ["TILEWRIGHT_KEY"]` : "";
  return `import json\n${key ? "import os\n" : ""}import urllib.request\n\nbody = ${J.python(J.parse(text))}\n\nrequest = urllib.request.Request(\n    ${JSON.stringify(address())},\n    data=json.dumps(body).encode(),\n` +
    `    headers={"Content-Type": "application/json"${auth}},\n)\nwith urllib.request.urlopen(request) as response:\n    result = json.load(response)\n\nfor name, answer in result["answers"].items():\n    print(name, answer)\n`;
}

async function copy(kind) {
  let text;
  try { text = program(kind); } catch (error) { return showError("There is nothing to copy yet", [error.message]); }
  $("code").textContent = text;
  $("snippet").hidden = false;
  let copied = true;
  try { await navigator.clipboard.writeText(text); } catch {
    // Pages of other machines without TLS have no clipboard; the old way needs a selection.
    $("snippet").open = true;
    const range = document.createRange();
    range.selectNodeContents($("code"));
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    try { copied = document.execCommand("copy"); } catch { copied = false; }
  }
  const name = kind === "curl" ? "curl" : "Python";
  say(copied ? `copied as ${name}${$("key").value.trim() ? "; the key is read from TILEWRIGHT_KEY" : ""}` : "the program is shown below: copy it from there");
}

for (const preset of PRESETS) $("preset").append(el("option", { value: preset.name }, `${preset.name}: ${preset.title}`));
$("preset").addEventListener("change", choosePreset);
$("form").addEventListener("submit", run);
$("add").addEventListener("click", addQuestion);
$("curl").addEventListener("click", () => copy("curl"));
$("python").addEventListener("click", () => copy("python"));
$("theme").addEventListener("change", event => { if (event.target.value) document.documentElement.dataset.theme = event.target.value; else delete document.documentElement.dataset.theme; });
for (const name of ["state", "questions"]) $(name).addEventListener("input", notes);
for (const input of document.querySelectorAll('input[name="state-mode"]')) input.addEventListener("change", () => {
  // A text becomes a JSON text and back, so that nothing has to be typed again.
  const text = $("state").value;
  if (mode("state-mode") === "json") { try { J.parse(text); } catch { if (text) $("state").value = JSON.stringify(text); } }
  else { try { const node = J.parse(text); if (node.k === "s") $("state").value = node.v; } catch { /* a text already */ } }
  notes();
});
for (const input of document.querySelectorAll('input[name="questions-mode"]')) input.addEventListener("change", switchQuestions);
document.addEventListener("keydown", event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(event); });
drawCards();
notes();
