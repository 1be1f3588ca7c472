// A small part of Markdown as DOM nodes. Text only ever becomes text nodes: never HTML.
"use strict";

function renderMarkdown(text) {
  const out = document.createDocumentFragment();
  const lines = text.split("\n");
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    if (line.startsWith("```")) {
      const end = lines.findIndex((l, at) => at > i && l.startsWith("```"));
      const stop = end < 0 ? lines.length : end;
      const code = element("code", lines.slice(i + 1, stop).join("\n"));
      const pre = document.createElement("pre");
      pre.append(code);
      out.append(pre);
      i = stop + 1;
    } else if (!line.trim()) {
      i += 1;
    } else if (/^#{1,6} /.test(line)) {
      out.append(inline(document.createElement("h3"), line.replace(/^#+ /, "")));
      i += 1;
    } else if (bullet(line) || numbered(line)) {
      const is = bullet(line) ? bullet : numbered;
      const list = document.createElement(is === bullet ? "ul" : "ol");
      if (is === numbered) list.start = parseInt(line.trimStart(), 10);
      for (; i < lines.length && is(lines[i]); i += 1) {
        list.append(inline(document.createElement("li"), is(lines[i])));
      }
      out.append(list);
    } else {
      const from = i;
      while (i < lines.length && isProse(lines[i], i === from)) i += 1;
      out.append(inline(document.createElement("p"), lines.slice(from, i).join("\n")));
    }
  }
  return out;
}

function isProse(line, first) {
  if (first) return true;
  return line.trim() && !line.startsWith("```") && !/^#{1,6} /.test(line) && !bullet(line) && !numbered(line);
}

function bullet(line) {
  return (/^\s{0,6}[-*+] (.+)$/.exec(line) || [])[1];
}

function numbered(line) {
  return (/^\s{0,6}\d{1,6}[.)] (.+)$/.exec(line) || [])[1];
}

function inline(parent, text) {
  for (const part of text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    if (part.length > 2 && part[0] === "`" && part.endsWith("`")) {
      parent.append(element("code", part.slice(1, -1)));
    } else if (part.length > 4 && part.startsWith("**") && part.endsWith("**")) {
      parent.append(element("strong", part.slice(2, -2)));
    } else {
      parent.append(part);
    }
  }
  return parent;
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}
