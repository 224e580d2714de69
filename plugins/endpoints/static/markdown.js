// Markdown of answers as elements: blocks, lists, tables, code, emphasis, links. Every character of an answer becomes
// text of an element that is made here, never markup, so an answer cannot bring scripts, styles or pictures.

// No pattern here repeats what may match the same characters twice: a line of any length takes time in proportion.
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}>\s?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
const RULED_CELL = /^:?-+:?$/;
const LINK = /^\[([^[\]]*)\]\((\S*?)\)/;
const ADDRESS = /^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,:;!?)\]]/;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
/** Quotes and lists nest to this depth; what is deeper is shown as it was written. */
const MAX_DEPTH = 8;

/** An element with children, one by one: a long answer has more than a call may have arguments. */
function make(kind, children = []) {
  const made = document.createElement(kind);
  for (const child of children) made.append(child);
  return made;
}

/** The elements of a Markdown text. */
export function render(text) {
  const made = document.createDocumentFragment();
  for (const block of blocks(text.replaceAll("\r\n", "\n").split("\n"), 0)) made.append(block);
  return made;
}

/** Where the last block of a text begins: what stands before it does not change when more text follows. */
export function lastBlock(text) {
  let fence = null;
  let start = 0;
  let at = 0;
  for (const line of text.split("\n")) {
    const opened = fenceOf(line);
    if (fence !== null) {
      if (opened && opened.mark.startsWith(fence) && opened.language === "") fence = null;
    } else if (opened) {
      fence = opened.mark;
    } else if (line.trim() === "" && !/^(?:\s|[-*+]\s|\d{1,9}[.)]\s)/.test(text.slice(at + line.length + 1))) {
      start = at + line.length + 1;
    }
    at += line.length + 1;
  }
  return Math.min(start, text.length);
}

function blocks(lines, depth) {
  const made = [];
  for (let at = 0; at < lines.length;) {
    const [element, next] = block(lines, at, depth);
    if (element) made.push(element);
    at = next;
  }
  return made;
}

/** The block that begins at a line, and the line after it. */
function block(lines, at, depth) {
  const line = lines[at];
  if (line.trim() === "") return [null, at + 1];
  const fence = fenceOf(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [make(`h${Math.min(6, heading[1].length + 2)}`, inline(headingText(heading[2]))), at + 1];
  if (RULE.test(line)) return [make("hr"), at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (line.includes("|") && at + 1 < lines.length && isRuled(lines[at + 1])) return table(lines, at);
  return paragraph(lines, at, depth);
}

/** The mark and the language of a line that opens a block of code; null for another line. */
function fenceOf(line) {
  const match = FENCE.exec(line);
  if (!match) return null;
  const rest = line.slice(match[0].length).trim();
  return match[1][0] === "`" && rest.includes("`") ? null : { mark: match[1], language: /^[\w+#.-]*/.exec(rest)[0] };
}

/** A heading without the number signs that may close it. */
function headingText(text) {
  const trimmed = text.trim();
  let end = trimmed.length;
  while (end > 0 && trimmed[end - 1] === "#") end -= 1;
  return end === 0 || /\s/.test(trimmed[end - 1]) ? trimmed.slice(0, end).trim() : trimmed;
}

/** Whether a line is the rule between the head and the body of a table. */
function isRuled(line) {
  return line.includes("|") && cellsOf(line).every((cell) => RULED_CELL.test(cell));
}

function cellsOf(line) {
  return line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());
}

function code(lines, at, { mark: fence, language }) {
  let end = at + 1;
  const closes = (line) => line.trim().startsWith(fence) && line.trim().replaceAll(fence[0], "") === "";
  while (end < lines.length && !closes(lines[end])) end += 1;
  const box = make("pre", [make("code", [lines.slice(at + 1, end).join("\n")])]);
  box.className = "code";
  if (language) box.dataset.language = language;
  return [box, end + 1];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return [make("blockquote", blocks(lines.slice(at, end).map((line) => line.replace(QUOTE, "")), depth + 1)), end];
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const ordered = /\d/.test(first[2]);
  const box = make(ordered ? "ol" : "ul");
  if (ordered && parseInt(first[2], 10) !== 1) box.start = parseInt(first[2], 10);
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || /\d/.test(item[2]) !== ordered || RULE.test(lines[at])) break;
    const width = Math.min(item[0].length, item[1].length + item[2].length + 4);
    const inside = [lines[at].slice(item[0].length)];
    at += 1;
    while (at < lines.length && belongs(lines, at, width)) {
      inside.push(lines[at].slice(Math.min(width, lines[at].search(/\S|$/))));
      at += 1;
    }
    box.append(make("li", itemContent(blocks(inside, depth + 1))));
  }
  return [box, at];
}

/** Whether a line goes on the list item whose text is indented by `width`. */
function belongs(lines, at, width) {
  const indent = lines[at].search(/\S|$/);
  if (lines[at].trim() === "") return at + 1 < lines.length && lines[at + 1].search(/\S/) >= Math.min(width, 2);
  if (indent >= Math.min(width, 2)) return true;
  return !ITEM.test(lines[at]) && lines[at - 1].trim() !== "" && !fenceOf(lines[at]) && !HEADING.test(lines[at]);
}

/** A paragraph that is all of an item's text needs no element of its own. */
function itemContent(made) {
  return made.length && made[0].tagName === "P" ? [...made[0].childNodes, ...made.slice(1)] : made;
}

function table(lines, at) {
  const head = cellsOf(lines[at]);
  const box = make("table", [make("thead", [make("tr", head.map((cell) => make("th", inline(cell))))])]);
  const body = make("tbody");
  for (at += 2; at < lines.length && lines[at].includes("|") && lines[at].trim() !== ""; at += 1) {
    const cells = cellsOf(lines[at]).slice(0, head.length); // missing ones stay out: short rows of a wide table add up
    body.append(make("tr", cells.map((cell) => make("td", inline(cell)))));
  }
  box.append(body);
  const scroller = make("div", [box]);
  scroller.className = "table";
  return [scroller, at];
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  const breaks = (line) => line.trim() === "" || fenceOf(line) || HEADING.test(line) || RULE.test(line)
    || (depth < MAX_DEPTH && (QUOTE.test(line) || ITEM.test(line)));
  while (end < lines.length && !breaks(lines[end])) end += 1;
  return [make("p", inline(lines.slice(at, end).join("\n"))), end];
}

/** The nodes of one line's text: code, links and emphasis; everything else as it is written. */
function inline(text, marks = MARKS) {
  const made = [];
  let plain = "";
  const flush = () => { if (plain !== "") made.push(plain); plain = ""; };
  for (let at = 0; at < text.length;) {
    const found = span(text, at, marks);
    if (found) {
      flush();
      made.push(found.node);
      at = found.end;
    } else if (text[at] === "\\" && /[\\`*_{}[\]()#+.!|~>-]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  flush();
  return made;
}

function span(text, at, marks) {
  if (text[at] === "`") {
    const fence = /^`+/.exec(text.slice(at))[0];
    const end = text.indexOf(fence, at + fence.length);
    if (end > 0) return { node: make("code", [text.slice(at + fence.length, end).trim()]), end: end + fence.length };
    return { node: fence, end: at + fence.length }; // nothing closes it, nor any part of it
  }
  if (text[at] === "[") {
    const match = LINK.exec(text.slice(at, at + 4096));
    return match && { node: link(match[2], match[1]), end: at + match[0].length };
  }
  if (text[at] === "h" && !/\w/.test(text[at - 1] ?? "")) {
    const match = ADDRESS.exec(text.slice(at, at + 4096));
    return match && { node: link(match[0], match[0]), end: at + match[0].length };
  }
  return emphasis(text, at, marks);
}

function emphasis(text, at, marks) {
  for (const [mark, kind] of marks) {
    if (!text.startsWith(mark, at)) continue;
    const start = at + mark.length;
    const end = text.indexOf(mark, start + 1);
    const inside = text.slice(start, end);
    const word = mark[0] === "_" && (/\w/.test(text[at - 1] ?? "") || /\w/.test(text[end + mark.length] ?? ""));
    if (end < 0 || word || /^\s|\s$/.test(inside) || inside.includes("\n\n")) continue;
    const rest = marks.filter(([other]) => other !== mark); // each mark nests once, so that depth is bounded
    return { node: make(kind, inline(inside, rest)), end: end + mark.length };
  }
  return null;
}

/** A link to another page of the web. Other addresses (`javascript:`, `data:`, relative ones) stay text. */
function link(address, text) {
  let url = null;
  try {
    url = new URL(address);
  } catch {
    return document.createTextNode(`${text} (${address})`);
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return document.createTextNode(`${text} (${address})`);
  const made = make("a", [text]);
  made.href = url.href;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}
