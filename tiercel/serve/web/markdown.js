/**
 * Markdown blocks: paragraphs, headings, lists, tables, code, quotes, rules.
 *
 * `MarkdownView` keeps the nodes of blocks whose source has not changed: while an answer streams
 * only its last block is made anew, so long answers stay cheap and selections survive. HTML in the
 * source is text like any other. Where models and CommonMark differ, models win: two spaces nest a
 * list whatever the marker's width, and a line of dashes is always a rule.
 */

import { codeBlock } from "./code.js";
import { element } from "./dom.js";
import { inlineNodes } from "./inline.js";
import { formula } from "./math.js";

const MAX_NESTING = 10; // nested quotes and lists; deeper ones are shown as typed
const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|(\d{1,9})([.)]))( +|$)/;
const TASK = /^\[([ xX])\] +/;
const ALIGNMENTS = { ":-": "left", "-:": "right", "::": "center" };
const MATH_CLOSERS = { "$$": "$$", "\\[": "\\]" };

/** Shows Markdown in a container and follows its growth. */
export class MarkdownView {
  #container;
  #blocks = [];

  constructor(container) {
    this.#container = container;
  }

  show(text) {
    const blocks = new BlockParser(text).parse();
    let same = 0;
    while (same < blocks.length && same < this.#blocks.length) {
      if (blocks[same].source !== this.#blocks[same].source) break;
      same += 1;
    }
    while (this.#container.childNodes.length > same) this.#container.lastChild.remove();
    for (const block of blocks.slice(same)) this.#container.append(block.make());
    this.#blocks = blocks;
  }
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function isBlank(line) {
  return line.trim() === "";
}

/** Splits source into blocks {source, make()}; `make` builds the node. */
class BlockParser {
  #lines;
  #depth;
  #at = 0;
  #blocks = [];
  #noMath = new Map(); // end of a formula -> the line before which no block has such an end

  constructor(text, depth = 0) {
    this.#lines = text.split(/\r\n|\r|\n/).map((line) => line.replaceAll("\t", "    "));
    this.#depth = depth;
  }

  parse() {
    while (this.#at < this.#lines.length) {
      const line = this.#lines[this.#at];
      if (isBlank(line)) this.#at += 1;
      else this.#block(line);
    }
    return this.#blocks;
  }

  #add(start, kind, make) {
    const source = `${kind}\n${this.#lines.slice(start, this.#at).join("\n")}`;
    this.#blocks.push({ source, kind, make });
  }

  #block(line) {
    const mayNest = this.#depth < MAX_NESTING;
    if (isFence(line)) this.#fence(FENCE.exec(line));
    else if (HEADING.test(line)) this.#heading(line);
    else if (RULE.test(line)) this.#rule();
    else if (QUOTE.test(line) && mayNest) this.#quote();
    else if (ITEM.test(line) && mayNest) this.#list(ITEM.exec(line));
    else if (this.#isTable(this.#at)) this.#table();
    else if (!this.#math()) this.#paragraph();
  }

  #fence([, indent, marks, info]) {
    const start = this.#at;
    const closer = new RegExp(`^ {0,3}\\${marks[0]}{${marks.length},} *$`);
    const code = [];
    this.#at += 1;
    while (this.#at < this.#lines.length && !closer.test(this.#lines[this.#at])) {
      const line = this.#lines[this.#at];
      code.push(line.slice(Math.min(indentOf(line), indent.length)));
      this.#at += 1;
    }
    this.#at = Math.min(this.#at + 1, this.#lines.length);
    const language = info.trim().split(/[\s{,]/, 1)[0];
    this.#add(start, "code", () => codeBlock(code.join("\n"), language));
  }

  #heading(line) {
    const [opening, marks] = HEADING.exec(line);
    let text = line.slice(opening.length).trim();
    const bare = text.replace(/#+$/, "");
    if (bare === "" || bare.endsWith(" ")) text = bare.trim();
    this.#at += 1;
    // The page has its own h1 and each answer an h2: headings of a model begin below these.
    const level = Math.min(marks.length + 2, 6);
    const properties = { class: `level-${marks.length}` };
    this.#add(this.#at - 1, "heading", () =>
      element(`h${level}`, properties, inlineNodes(text)),
    );
  }

  #rule() {
    this.#at += 1;
    this.#add(this.#at - 1, "rule", () => element("hr"));
  }

  #quote() {
    const start = this.#at;
    const inner = [];
    while (this.#at < this.#lines.length && QUOTE.test(this.#lines[this.#at])) {
      inner.push(this.#lines[this.#at].replace(QUOTE, ""));
      this.#at += 1;
    }
    const blocks = new BlockParser(inner.join("\n"), this.#depth + 1).parse();
    this.#add(start, "quote", () =>
      element("blockquote", {}, ...blocks.map((block) => block.make())),
    );
  }

  #list(first) {
    const start = this.#at;
    const items = [];
    const base = first[1].length;
    const isSame = (match) =>
      match !== null &&
      Math.abs(match[1].length - base) < 2 &&
      (match[4] ?? match[2]) === (first[4] ?? first[2]);
    let isLoose = false;
    while (this.#at < this.#lines.length) {
      const blankBefore = this.#skipBlank();
      const line = this.#lines[this.#at] ?? "";
      const match = RULE.test(line) ? null : ITEM.exec(line);
      if (!isSame(match)) {
        this.#at -= blankBefore;
        break;
      }
      isLoose ||= blankBefore > 0 && items.length > 0;
      items.push(new BlockParser(this.#itemLines(match).join("\n"), this.#depth + 1).parse());
    }
    const isOrdered = first[3] !== undefined;
    const number = isOrdered && first[3] !== "1" ? Number(first[3]) : null;
    this.#add(start, "list", () =>
      element(
        isOrdered ? "ol" : "ul",
        { start: number, class: isLoose ? "loose" : null },
        ...items.map((blocks) => element("li", {}, ...itemNodes(blocks, isLoose))),
      ),
    );
  }

  #skipBlank() {
    const start = this.#at;
    while (this.#at < this.#lines.length && isBlank(this.#lines[this.#at])) this.#at += 1;
    return this.#at - start;
  }

  /** The lines of one item without their indent; the position is after the item then. */
  #itemLines(match) {
    const [whole, indent, marker, , , spaces] = match;
    const content = indent.length + marker.length + (spaces.length > 4 ? 1 : spaces.length || 1);
    const needed = Math.min(content, indent.length + 2);
    const lines = [this.#lines[this.#at].slice(Math.min(content, whole.length))];
    this.#at += 1;
    while (this.#at < this.#lines.length) {
      const blank = this.#skipBlank();
      const line = this.#lines[this.#at];
      const isInside = line !== undefined && indentOf(line) >= needed;
      const isLazy = blank === 0 && line !== undefined && !this.#interrupts(this.#at);
      if (!isInside && !isLazy) {
        this.#at -= blank;
        break;
      }
      lines.push(...Array(blank).fill(""), line.slice(Math.min(indentOf(line), content)));
      this.#at += 1;
    }
    return lines;
  }

  #isTable(at) {
    const header = this.#lines[at];
    const ruler = this.#lines[at + 1];
    if (ruler === undefined || !header.includes("|") || !ruler.includes("-")) return false;
    if (!/^[\s|:-]+$/.test(ruler)) return false;
    const cells = splitRow(ruler);
    return cells.every((cell) => /^:?-+:?$/.test(cell)) && cells.length === splitRow(header).length;
  }

  #table() {
    const start = this.#at;
    const header = splitRow(this.#lines[start]);
    const sides = splitRow(this.#lines[start + 1]).map(
      (cell) => ALIGNMENTS[`${cell[0]}${cell.at(-1)}`] ?? null,
    );
    const rows = [];
    this.#at += 2;
    while (this.#at < this.#lines.length && !isBlank(this.#lines[this.#at])) {
      if (this.#interrupts(this.#at)) break;
      rows.push(splitRow(this.#lines[this.#at]).slice(0, header.length));
      this.#at += 1;
    }
    this.#add(start, "table", () => tableNode(header, sides, rows));
  }

  #math() {
    const start = this.#at;
    const math = this.#mathAt(start);
    if (!math) return false;
    this.#at = math.end + 1;
    this.#add(start, "math", () => formula(math.source, true));
    return true;
  }

  /** The formula that fills the lines from `at` to `end`: {source, end}, or null. */
  #mathAt(at) {
    const first = this.#lines[at].trimStart();
    const closer = MATH_CLOSERS[first.slice(0, 2)];
    if (!closer || at < (this.#noMath.get(closer) ?? 0)) return null;
    const lines = [];
    let end = at;
    for (let text = first.slice(2); text !== undefined && !isFence(text); text = this.#lines[end]) {
      const length = text.indexOf(closer);
      lines.push(length < 0 ? text : text.slice(0, length));
      if (length >= 0) {
        const source = lines.join("\n").trim();
        if (source && isBlank(text.slice(length + closer.length))) return { source, end };
        break;
      }
      end += 1;
    }
    this.#noMath.set(closer, end); // One failed search is enough for all lines up to its end.
    return null;
  }

  #interrupts(at) {
    const line = this.#lines[at];
    const starts = [HEADING, RULE, QUOTE].some((pattern) => pattern.test(line));
    const item = ITEM.exec(line);
    if (starts || isFence(line) || (item !== null && item[5] !== "")) return true;
    return this.#mathAt(at) !== null;
  }

  #paragraph() {
    const start = this.#at;
    const lines = [];
    do {
      lines.push(this.#lines[this.#at].trimStart());
      this.#at += 1;
    } while (
      this.#at < this.#lines.length &&
      !isBlank(this.#lines[this.#at]) &&
      !this.#interrupts(this.#at) &&
      !this.#isTable(this.#at)
    );
    const text = lines.join("\n").trimEnd();
    this.#add(start, "paragraph", () => element("p", {}, inlineNodes(text)));
  }
}

function isFence(line) {
  const match = FENCE.exec(line);
  return match !== null && (match[2][0] === "~" || !match[3].includes("`"));
}

/** In a tight list a paragraph is the item's own text, as in CommonMark. */
function itemNodes(blocks, isLoose) {
  const nodes = [];
  for (const block of blocks) {
    const node = block.make();
    if (block.kind !== "paragraph") {
      nodes.push(node);
      continue;
    }
    if (!nodes.length) markTask(node);
    if (isLoose) nodes.push(node);
    else nodes.push(...node.childNodes);
  }
  return nodes;
}

function markTask(paragraph) {
  const text = paragraph.firstChild;
  const match = text?.nodeType === Node.TEXT_NODE ? TASK.exec(text.data) : null;
  if (!match) return;
  const isDone = match[1] !== " ";
  const label = isDone ? "done" : "not done";
  text.data = ` ${text.data.slice(match[0].length)}`;
  paragraph.prepend(
    element("span", { class: "task", role: "img", "aria-label": label }, isDone ? "☑" : "☐"),
  );
}

/** The cells of a table row; a pipe after a backslash or within code is text. */
function splitRow(line) {
  const cells = [];
  let cell = "";
  let isCode = false;
  const text = line.trim().replace(/^\|/, "");
  for (let i = 0; i < text.length; i += 1) {
    const char = text[i];
    if (char === "\\" && text[i + 1] === "|") {
      cell += "|";
      i += 1;
    } else if (char === "|" && !isCode) {
      cells.push(cell.trim());
      cell = "";
    } else {
      if (char === "`" && (isCode || text.indexOf("`", i + 1) > 0)) isCode = !isCode;
      cell += char;
    }
  }
  if (cell.trim()) cells.push(cell.trim());
  return cells;
}

function tableNode(header, sides, rows) {
  const cellsOf = (tag, texts) =>
    header.map((_, column) =>
      element(
        tag,
        {
          class: sides[column] ? `align-${sides[column]}` : null,
          scope: tag === "th" ? "col" : null,
        },
        inlineNodes(texts[column] ?? ""),
      ),
    );
  const table = element(
    "table",
    {},
    element("thead", {}, element("tr", {}, ...cellsOf("th", header))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cellsOf("td", row)))),
  );
  // Wide tables scroll by themselves; the keyboard must reach them to do so.
  const properties = { class: "table", tabindex: 0, role: "region", "aria-label": "Table" };
  return element("div", properties, table);
}
