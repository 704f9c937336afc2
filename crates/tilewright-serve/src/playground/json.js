// JSON that keeps what JavaScript's own reader loses: the order of keys such as "10" and "9", and numbers as they were written.
// A value is {k: "o", v: [[key, value]...]}, {k: "a", v: [...]}, {k: "s", v: text} or {k: "r", v: raw text of a number, true, false or null}.
const J = {
  parse(text) {
    let at = 0;
    const fail = what => {
      const before = text.slice(0, at).split("\n");
      throw new SyntaxError(`line ${before.length}, column ${before[before.length - 1].length + 1}: ${what}`);
    };
    const blank = () => { while (at < text.length && " \t\r\n".includes(text[at])) at++; };
    const string = () => {
      const found = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y;
      found.lastIndex = at;
      const hit = found.exec(text);
      if (!hit) fail("this text has no end, or holds a line break or a wrong escape");
      at += hit[0].length;
      return JSON.parse(hit[0]);
    };
    const value = depth => {
      if (depth > 500) fail("too deep");
      blank();
      const c = text[at];
      if (c === '"') return { k: "s", v: string() };
      if (c === "{" || c === "[") {
        const end = c === "{" ? "}" : "]", all = [];
        at++; blank();
        if (text[at] === end) { at++; return { k: c === "{" ? "o" : "a", v: all }; }
        for (;;) {
          if (c === "{") {
            blank();
            if (text[at] !== '"') fail("a key in double quotes is missing");
            const key = string();
            blank();
            if (text[at] !== ":") fail("a colon is missing");
            at++;
            const inner = value(depth + 1), old = all.find(p => p[0] === key);
            if (old) old[1] = inner; else all.push([key, inner]);
          } else all.push(value(depth + 1));
          blank();
          if (text[at] === ",") { at++; continue; }
          if (text[at] === end) { at++; return { k: c === "{" ? "o" : "a", v: all }; }
          fail(`a comma or ${end} is missing`);
        }
      }
      const raw = /(?:true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(?![\w.])/y;
      raw.lastIndex = at;
      const hit = raw.exec(text);
      if (!hit) fail(at >= text.length ? "something is missing at the end" : "this is no value; a text stands in double quotes");
      at += hit[0].length;
      return { k: "r", v: hit[0] };
    };
    const all = value(0);
    blank();
    if (at < text.length) fail("there is more after the end");
    return all;
  },
  // With an indent for people, without one as it is sent.
  write(node, indent = "", step = "  ", words = {}) {
    if (node.k === "s") return JSON.stringify(node.v);
    if (node.k === "r") return words[node.v] ?? node.v;
    const [open, close] = node.k === "o" ? "{}" : "[]";
    if (!node.v.length) return open + close;
    const inner = indent + step;
    const rows = node.v.map(v => node.k === "o"
      ? JSON.stringify(v[0]) + ": " + J.write(v[1], inner, step, words) : J.write(v, inner, step, words));
    const flat = open + rows.join(", ") + close;
    if (flat.length + indent.length < 88 && !flat.includes("\n")) return flat;
    return open + "\n" + rows.map(r => inner + r).join(",\n") + "\n" + indent + close;
  },
  python: node => J.write(node, "", "    ", { true: "True", false: "False", null: "None" }),
  text: v => ({ k: "s", v }),
  object: v => ({ k: "o", v }),
  list: v => ({ k: "a", v }),
  get: (node, key) => node && node.k === "o" ? node.v.find(p => p[0] === key)?.[1] : undefined,
  number: node => node && node.k === "r" && !isNaN(Number(node.v)) && node.v !== "null" ? Number(node.v) : undefined,
  plain: node => node === undefined ? "" : node.k === "s" ? node.v : J.write(node),
};
