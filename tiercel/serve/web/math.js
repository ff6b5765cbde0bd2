/**
 * Formulas: a placeholder shows the source until KaTeX has turned it into nodes.
 *
 * The library is part of the package and is loaded with the first visible formula. It builds nodes
 * and sets styles through the DOM, so the page's policy applies. The cost of a formula is bounded
 * by its length, since no allowed command repeats its arguments, and by the nodes on the page.
 */

import { element } from "./dom.js";

const MAX_CHARACTERS = 2000; // a matrix of 950 columns took 0.2 s (2 shared x86 cores, Node 20)
const MAX_NODES = 200_000; // on the whole page; beyond them new formulas stay source
const MAX_KEPT = 1000; // formulas; the oldest are dropped
const SLICE_MS = 8; // of work without a pause for the page

/** Refuses a formula with \def and similar commands: 2,000 characters of them took 144 s. */
function refuse() {
  throw new Error("This command is switched off.");
}

const REFUSED =
  "def gdef edef xdef let futurelet newcommand renewcommand providecommand global long " +
  "message errmessage show"; // the last three write to the browser's console
const OPTIONS = {
  strict: "ignore", // a warning of LaTeX does not matter to the user
  trust: false,
  throwOnError: true, // KaTeX's own error node has a style attribute, which the policy refuses
  errorColor: "var(--danger)", // of commands that need trust
  maxSize: 20, // em
  maxExpand: 1000,
  macros: {
    ...Object.fromEntries(REFUSED.split(" ").map((name) => [`\\${name}`, refuse])),
    // KaTeX gives these two a style attribute, which the policy refuses.
    "\\pmb": "\\boldsymbol{#1}",
    "\\fcolorbox": "\\@secondoftwo{#1}{\\colorbox{#2}{#3}}",
  },
};

const kept = new Map(); // source with its dollars -> node to copy, or null if it is no formula
const waiting = []; // placeholders whose source is not turned into nodes yet
let library = null; // promise of KaTeX
let isWorking = false;

/** A placeholder for a formula; it shows the source if the formula cannot be typeset. */
export function formula(source, isDisplay) {
  // Wide formulas scroll by themselves; the keyboard must reach them to do so.
  const scrolls = { class: "math is-display", tabindex: 0, role: "group", "aria-label": "Formula" };
  const place = element("span", isDisplay ? scrolls : { class: "math" }, source);
  place.dataset.source = isDisplay ? `$$${source}$$` : `$${source}$`;
  if (kept.has(place.dataset.source)) {
    fill(place);
  } else if (source.length <= MAX_CHARACTERS) {
    waiting.push(place);
    work();
  }
  return place;
}

function fill(place) {
  const node = kept.get(place.dataset.source);
  if (!node) return;
  place.classList.add("is-typeset");
  place.replaceChildren(node.cloneNode(true));
}

async function work() {
  if (isWorking) return;
  isWorking = true;
  await pause(); // until the placeholders are on the page
  let sliceEnd = 0;
  while (waiting.length) {
    const place = waiting.shift();
    if (!place.isConnected) continue; // A growing answer rebuilds its last block.
    const katex = await load();
    if (performance.now() > sliceEnd) {
      await pause();
      sliceEnd = performance.now() + SLICE_MS;
      if (katex === null || isFull()) break;
    }
    typeset(katex, place);
  }
  waiting.length = 0; // Remaining formulas stay source.
  isWorking = false;
}

function pause() {
  return new Promise((resolve) => {
    setTimeout(resolve);
  });
}

function isFull() {
  return document.getElementsByTagName("*").length > MAX_NODES;
}

function typeset(katex, place) {
  const { source } = place.dataset;
  if (!kept.has(source)) {
    if (kept.size >= MAX_KEPT) kept.delete(kept.keys().next().value);
    kept.set(source, made(katex, place.textContent, place.matches(".is-display")));
  }
  fill(place);
}

function made(katex, source, displayMode) {
  const node = element("span");
  try {
    katex.render(source, node, { ...OPTIONS, displayMode });
  } catch {
    return null; // Not a formula that KaTeX knows: its source is more useful than an error.
  }
  return node.firstChild;
}

/** KaTeX with its styles; null if loading fails, which is tried again. */
function load() {
  library ??= Promise.all([import("./katex-0.19.1/katex.min.js"), loadStyles()]).then(
    () => {
      document.addEventListener("copy", copySource);
      return globalThis.katex;
    },
    () => {
      library = null;
      return null;
    },
  );
  return library;
}

function loadStyles() {
  const href = new URL("./katex-0.19.1/katex.min.css", import.meta.url).href;
  return new Promise((load, error) => {
    document.head.append(element("link", { rel: "stylesheet", href, load, error }));
  });
}

/** Formulas are copied as their source; KaTeX's nodes hold each of them twice. */
function copySource(event) {
  const selection = document.getSelection();
  if (!selection.rangeCount || selection.isCollapsed) return;
  const range = selection.getRangeAt(0).cloneRange();
  const { commonAncestorContainer: node } = range;
  const around = (node instanceof Element ? node : node.parentElement)?.closest(".math");
  if (around) range.selectNode(around); // a part of a formula selects all of it
  const copied = element("div", { class: "copied" }, range.cloneContents());
  const formulas = copied.querySelectorAll(".math");
  if (!formulas.length) return;
  for (const place of formulas) place.replaceChildren(place.dataset.source);
  document.body.append(copied);
  event.clipboardData.setData("text/plain", copied.innerText); // with the breaks between blocks
  copied.remove();
  event.preventDefault();
}
