// The questions as a form. What a form cannot show (criteria that are objects, say) stays JSON, question by question.
const $ = id => document.getElementById(id);
const el = (tag, attributes = {}, ...inner) => {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...inner);
  return made;
};
const mode = name => document.querySelector(`input[name="${name}"]:checked`).value;
const setMode = (name, value) => { document.querySelector(`input[name="${name}"][value="${value}"]`).checked = true; };
const say = text => { $("status").textContent = text; };

const TYPES = { choice: "one of several", noul: "yes or no", score: "a level" };
let questions = [];
let ids = 0;

// From a definition to what the form edits; {raw} where the form would lose something.
function fromNode(id, node) {
  const raw = { id, raw: J.write(node) };
  const type = J.get(node, "type"), instructions = J.get(node, "instructions"), criteria = J.get(node, "criteria");
  if (node.k !== "o" || type?.k !== "s" || !TYPES[type.v] || instructions?.k !== "s") return raw;
  const others = node.v.filter(p => !["type", "instructions", "criteria"].includes(p[0]));
  const known = { id, type: type.v, instructions: instructions.v, others, options: [] };
  const empty = c => c.k === "r" && c.v === "null" || c.k === "s" && c.v === "";
  if (type.v === "score") {
    if (criteria?.k !== "a" || criteria.v.some(c => c.k !== "s")) return raw;
    known.options = criteria.v.map(c => ({ text: c.v }));
  } else if (type.v === "choice") {
    if (criteria?.k === "a" && criteria.v.every(c => c.k === "s")) known.options = criteria.v.map(c => ({ label: c.v, text: "" }));
    else if (criteria?.k === "o" && criteria.v.every(p => p[1].k === "s" || empty(p[1]))) known.options = criteria.v.map(p => ({ label: p[0], text: empty(p[1]) ? "" : p[1].v }));
    else return raw;
  } else if (criteria !== undefined && !empty(criteria)) {
    if (criteria.k !== "o" || criteria.v.some(p => p[1].k !== "s" || !["true", "false"].includes(p[0]))) return raw;
    known.yes = J.plain(J.get(criteria, "true"));
    known.no = J.plain(J.get(criteria, "false"));
  }
  return known;
}

function toNode(q) {
  if (q.raw !== undefined) return J.parse(q.raw);
  const rows = [["type", J.text(q.type)], ["instructions", J.text(q.instructions)]];
  if (q.type === "score") rows.push(["criteria", J.list(q.options.map(o => J.text(o.text ?? "")))]);
  if (q.type === "choice") {
    const described = q.options.some(o => o.text), labels = q.options.map(o => o.label ?? "");
    const twice = labels.find((l, i) => labels.indexOf(l) !== i);
    if (twice !== undefined) throw new SyntaxError(`question ${q.id}: the label ${JSON.stringify(twice)} is there twice`);
    rows.push(["criteria", described
      ? J.object(q.options.map(o => [o.label ?? "", o.text ? J.text(o.text) : { k: "r", v: "null" }])) : J.list(labels.map(J.text))]);
  }
  if (q.type === "noul" && (q.yes || q.no)) rows.push(["criteria", J.object([["true", q.yes], ["false", q.no]].filter(p => p[1]).map(p => [p[0], J.text(p[1])]))]);
  return J.object([...rows, ...(q.others ?? [])]);
}

function formNode() {
  const seen = questions.map(q => q.id), twice = seen.find((id, i) => seen.indexOf(id) !== i);
  if (twice !== undefined) throw new SyntaxError(`two questions have the name ${JSON.stringify(twice)}`);
  return J.object(questions.map(q => [q.id, toNode(q)]));
}

// A label with its control; what is typed goes to `set`.
function field(name, value, set, long) {
  const control = long ? el("textarea", { rows: long, spellcheck: "false" }) : el("input", { type: "text", spellcheck: "false" });
  control.value = value ?? "";
  control.addEventListener("input", () => set(control.value));
  return el("label", {}, name, control);
}

function optionRow(q, index, redraw) {
  const option = q.options[index], level = q.type === "score", number = level ? index : index + 1;
  const remove = el("button", { type: "button", "aria-label": `Remove ${level ? "level" : "option"} ${number}`, onclick: () => {
    q.options.splice(index, 1);
    redraw(`.option:nth-of-type(${Math.max(1, Math.min(index + 1, q.options.length))}) button, .add-option`);
  } }, "\u00d7");
  const text = field(level ? `Level ${number}` : `Description ${number}`, option.text, v => { option.text = v; });
  if (level) return el("div", { class: "option level" }, text, remove);
  return el("div", { class: "option" }, field(`Label ${number}`, option.label, v => { option.label = v; }), text, remove);
}

function card(q) {
  const box = el("fieldset", { class: "card" });
  const draw = focus => {
    const heading = el("legend", {}, q.id || "question without a name");
    box.replaceChildren(heading);
    const name = field("Name of the question", q.id, v => { q.id = v; heading.textContent = v || "question without a name"; });
    const removal = el("button", { type: "button", "aria-label": `Remove question ${q.id}`, onclick: () => {
      const at = questions.indexOf(q);
      questions.splice(at, 1);
      drawCards();
      (document.querySelectorAll("#cards .card input")[Math.max(0, at - 1)] ?? $("add")).focus();
      say("question removed");
    } }, "Remove the question");
    if (q.raw !== undefined) {
      box.append(name, field("The question as JSON (it holds what a form cannot show)", q.raw, v => { q.raw = v; }, 8), el("div", { class: "actions" }, removal));
      return;
    }
    const type = el("select", { onchange: event => {
      q.type = event.target.value;
      if (q.type !== "noul" && !q.options.length) q.options = [{ label: "", text: "" }, { label: "", text: "" }];
      draw("select");
    } }, ...Object.entries(TYPES).map(([value, words]) => el("option", { value, selected: value === q.type }, `${value}: ${words}`)));
    box.append(el("div", { class: "two" }, name, el("label", {}, "Type", type)), field("What is asked", q.instructions, v => { q.instructions = v; }, 2));
    const actions = el("div", { class: "actions" });
    if (q.type === "noul") {
      box.append(field("Yes means (optional)", q.yes, v => { q.yes = v; }), field("No means (optional)", q.no, v => { q.no = v; }));
    } else {
      const words = q.type === "score" ? "level" : "option";
      q.options.forEach((_, i) => box.append(optionRow(q, i, draw)));
      actions.append(el("button", { type: "button", class: "add-option", onclick: () => {
        q.options.push({ label: "", text: "" });
        draw(`.option:nth-of-type(${q.options.length}) input`);
      } }, `Add a${words === "option" ? "n" : ""} ${words}`));
    }
    if (q.others?.length) box.append(el("p", { class: "note" }, `Kept as it is: ${q.others.map(p => p[0]).join(", ")}`));
    actions.append(removal);
    box.append(actions);
    if (focus) (box.querySelector(focus) ?? box.querySelector("input")).focus();
  };
  draw();
  return box;
}

function drawCards() {
  $("cards").replaceChildren(...questions.map(card));
  if (!questions.length) $("cards").append(el("p", { class: "note" }, "No question yet."));
}

function addQuestion() {
  ids += 1;
  while (questions.some(q => q.id === `question_${ids}`)) ids += 1;
  questions.push({ id: `question_${ids}`, type: "noul", instructions: "", options: [] });
  drawCards();
  document.querySelector("#cards .card:last-of-type input").focus();
}

// Shows the same questions in the other way of writing; stays where it is if they cannot be read.
function switchQuestions() {
  const json = mode("questions-mode") === "json";
  try {
    if (json) $("questions").value = J.write(formNode());
    else {
      const node = J.parse($("questions").value.trim() || "{}");
      if (node.k !== "o") throw new SyntaxError("questions are an object of names and definitions");
      questions = node.v.map(p => fromNode(p[0], p[1]));
      drawCards();
    }
    $("as-json").hidden = !json;
    $("cards").hidden = $("add-row").hidden = json;
    notes();
  } catch (error) {
    setMode("questions-mode", json ? "form" : "json");
    showError("The questions cannot be read", [error.message]);
  }
}

const LIMIT = 50000;

// What is wrong with a text, or how long it is, under its box.
function notes() {
  const text = $("state").value, length = [...text].length;
  let words = `${length.toLocaleString("en")} characters`, over = length > LIMIT;
  if (over) words += `; servers read ${LIMIT.toLocaleString("en")} at most unless told otherwise`;
  if (mode("state-mode") === "json" && text.trim()) {
    try { J.parse(text); } catch (error) { words += `; not JSON yet: ${error.message}`; over = true; }
  }
  $("state-note").textContent = words;
  $("state-note").classList.toggle("over", over);
  let bad = "";
  try { if ($("questions").value.trim()) J.parse($("questions").value); } catch (error) { bad = `not JSON yet: ${error.message}`; }
  $("questions-note").textContent = bad;
  $("questions-note").classList.toggle("over", bad !== "");
}

function choosePreset() {
  const preset = PRESETS.find(p => p.name === $("preset").value);
  if (!preset) return;
  setMode("state-mode", "json");
  $("state").value = J.write(J.object([[preset.field, J.text(preset.sample)]]));
  questions = J.parse(preset.questions).v.map(p => fromNode(p[0], p[1]));
  $("questions").value = preset.questions;
  $("questions").value = J.write(formNode());
  drawCards();
  notes();
  say(`${questions.length} questions of ${preset.name}; they read the field ${preset.field} of the state`);
}
