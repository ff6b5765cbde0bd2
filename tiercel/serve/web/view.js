/**
 * Shows a conversation: questions, growing answers, reasoning, tool calls, errors.
 *
 * One AnswerView per answer updates its own nodes; nothing is rebuilt while text streams into it.
 */

import { hasOutput, isWhole, shownAnswer } from "./answer.js";
import { copyButton, element, icon, iconButton, setText, textButton } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const FOLLOW_PIXELS = 60; // this near to the end, the view follows new text

/** A time in seconds or milliseconds. */
function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10_000 ? 1 : 0)} s`;
}

/** The measurements of an answer in one short line. */
export function statsLine(stats) {
  if (!stats) return "";
  const parts = [];
  if (stats.tokensPerSecond !== null) {
    const rate = stats.tokensPerSecond;
    parts.push(`${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`);
  }
  parts.push(`first token ${duration(stats.firstTokenMs)}`);
  if (stats.tokens !== null) parts.push(`${stats.tokens} token${stats.tokens === 1 ? "" : "s"}`);
  return parts.join(" · ");
}

/** What happened to an answer that did not end by itself: {text, isFailure}, or null. */
export function noteOf(end) {
  if (end?.kind === "stopped") return { text: "You stopped this answer." };
  if (end?.kind === "interrupted") return { text: "The page was closed during this answer." };
  if (end?.kind === "failed") return { text: wordsOf(end.error), isFailure: true };
  if (end?.reason === "length") {
    return { text: "Cut off: the limit of tokens, or of the model’s context, was reached." };
  }
  return null;
}

function wordsOf({ kind, message, retryAfter }) {
  if (kind === "unreachable") {
    return "The server does not answer. It may have been stopped, or the network is down.";
  }
  if (kind === "unauthorized") return "The server wants a valid API key for this.";
  if (kind === "broken") return `${message} What had arrived is kept.`;
  if (kind === "busy") {
    const when = retryAfter === null ? "in a moment" : `in ${retryAfter} s`;
    return `The server is busy: too many requests are waiting. Try again ${when}.`;
  }
  if (kind === "unavailable") return `The server cannot answer yet: ${message}`;
  return message;
}

class ToolCard {
  #name = element("strong");
  #arguments = element("pre", { tabindex: 0 });
  #field;
  #result = element("pre", { tabindex: 0 });
  #asked;
  #given;

  constructor(call, changed) {
    this.#field = element("textarea", {
      rows: 2,
      spellcheck: "false",
      placeholder: "What the function returned",
      input: () => changed(call, this.#field.value),
    });
    this.#field.value = call.result;
    this.#asked = element("label", { class: "tool-result" }, "Result", this.#field);
    this.#given = element("div", { class: "tool-result" }, "Result", this.#result);
    const head = element("div", { class: "tool-head" }, icon("tool"), "Calls ", this.#name);
    const properties = { class: "tool", "aria-label": "Tool call" };
    const parts = [head, this.#arguments, this.#asked, this.#given];
    this.node = element("section", properties, ...parts);
  }

  update(call, isOpen, isRunning) {
    setText(this.#name, call.name || "…");
    setText(this.#arguments, isRunning ? call.arguments : indented(call.arguments));
    setText(this.#result, call.result);
    this.#asked.hidden = !isOpen;
    this.#given.hidden = isOpen || !call.result;
  }
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json || "{}"), null, 2);
  } catch {
    return json; // Cut off, or not JSON: shown unchanged.
  }
}

class Reasoning {
  #summary = element("span");
  #body = element("div", { class: "prose" });
  #markdown = new MarkdownView(this.#body);
  #isChosen = false; // the user has opened or closed it

  constructor() {
    const head = element("summary", {}, icon("chevron"), this.#summary);
    this.node = element("details", { class: "reasoning", hidden: true }, head, this.#body);
    head.addEventListener("click", () => {
      this.#isChosen = true;
    });
  }

  update(answer, isRunning) {
    this.node.hidden = !answer.reasoning;
    if (!answer.reasoning) return;
    const isThinking = isRunning && !hasOutput(answer);
    setText(this.#summary, isThinking ? "Thinking…" : "Thoughts");
    this.node.classList.toggle("is-thinking", isThinking);
    if (!this.#isChosen) this.node.open = isThinking;
    this.#markdown.show(answer.reasoning);
  }
}

class AnswerView {
  #turn;
  #actions;
  #answer = null; // the visible version
  #cards = [];
  #reasoning = new Reasoning();
  #body = element("div", { class: "prose" });
  #markdown = new MarkdownView(this.#body);
  #words = element("span");
  #waiting = element("p", { class: "waiting" }, element("span", { class: "pulse" }), this.#words);
  #tools = element("div", { class: "tools" });
  #resume;
  #note = element("p");
  #alert;
  #stats = element("span", { class: "stats" });
  #variants;
  #regenerate;
  #foot;

  /** Actions: regenerate(), resume(), setResult(call, text), showAnswer(index). */
  constructor(turn, actions) {
    this.#turn = turn;
    this.#actions = actions;
    const again = () => actions.regenerate();
    this.#resume = textButton("send", "Send results", () => actions.resume(), "button primary");
    this.#alert = element("div", { class: "note" }, this.#note);
    this.#alert.append(textButton("again", "Try again", again));
    this.#regenerate = iconButton("again", "Regenerate", again);
    this.#variants = this.#makeVariants();
    this.#foot = element(
      "footer",
      { class: "answer-foot" },
      copyButton("Copy answer", () => shownAnswer(turn).content),
      this.#regenerate,
      this.#variants.node,
      this.#stats,
    );
    this.node = element(
      "article",
      { class: "answer", "aria-label": "Answer" },
      element("h2", { class: "visually-hidden" }, "Answer"),
      ...[this.#reasoning.node, this.#body, this.#waiting, this.#tools, this.#resume],
      ...[this.#alert, this.#foot],
    );
  }

  #makeVariants() {
    const turn = this.#turn;
    const step = (by) => () => this.#actions.showAnswer(turn.shown + by);
    const back = iconButton("left", "Previous version", step(-1));
    const next = iconButton("right", "Next version", step(1));
    const place = element("span", {});
    const node = element("div", { class: "variants" }, back, place, next);
    return { node, back, next, place };
  }

  /** Shows the answer's present state; `waiting` are words for the time before its first token. */
  update({ isRunning, isLast, waiting }) {
    const answer = shownAnswer(this.#turn);
    const isEmpty = !answer.reasoning && !hasOutput(answer);
    if (answer !== this.#answer) {
      this.#answer = answer;
      this.#cards = [];
      this.#tools.replaceChildren();
    }
    this.node.setAttribute("aria-busy", String(isRunning));
    this.#reasoning.update(answer, isRunning);
    this.#markdown.show(answer.content);
    this.#waiting.hidden = !(isRunning && isEmpty);
    setText(this.#words, waiting);
    this.#updateTools(answer, isRunning, isLast);
    this.#updateNote(answer, isLast && !isRunning);
    this.#updateFoot(answer, isRunning, isLast, isEmpty);
  }

  #updateTools(answer, isRunning, isLast) {
    const isOpen = isLast && !isRunning;
    for (const [index, call] of answer.toolCalls.entries()) {
      if (!this.#cards[index]) {
        this.#cards[index] = new ToolCard(call, this.#actions.setResult);
        this.#tools.append(this.#cards[index].node);
      }
      this.#cards[index].update(call, isOpen && isWhole(call), isRunning);
    }
    this.#resume.hidden = !(isOpen && answer.toolCalls.some(isWhole));
  }

  #updateNote(answer, canRepeat) {
    const note = noteOf(answer.end);
    this.#alert.hidden = note === null;
    setText(this.#note, note?.text ?? "");
    this.#alert.classList.toggle("failure", note?.isFailure === true);
    this.#alert.lastChild.hidden = !(note?.isFailure && canRepeat);
  }

  #updateFoot(answer, isRunning, isLast, isEmpty) {
    const count = this.#turn.answers.length;
    const { node, back, next, place } = this.#variants;
    // A failed answer has "Try again" next to the reason.
    const canRepeat = isLast && !isRunning && answer.end?.kind !== "failed";
    const isBare = isEmpty && count === 1 && !canRepeat;
    this.#foot.hidden = isRunning ? answer.stats === null : isBare;
    this.#foot.firstChild.hidden = isRunning || !answer.content;
    this.#regenerate.hidden = !canRepeat;
    node.hidden = isRunning || count === 1;
    back.disabled = this.#turn.shown === 0;
    next.disabled = this.#turn.shown === count - 1;
    setText(place, `${this.#turn.shown + 1} / ${count}`);
    place.setAttribute("aria-label", `Version ${this.#turn.shown + 1} of ${count}`);
    setText(this.#stats, statsLine(answer.stats));
  }
}

/** The scrolling log of one conversation. */
export class ConversationView {
  #log = document.getElementById("log");
  #scroller = document.getElementById("scroller");
  #latest = document.getElementById("latest");
  #actions;
  #conversation = null;
  #views = [];
  #isFollowing = true;

  /** Actions: see AnswerView; each takes the turn first; and edit(turn). */
  constructor(actions) {
    this.#actions = actions;
    this.#scroller.addEventListener("scroll", () => this.#noteScroll(), { passive: true });
    this.#latest.addEventListener("click", () => this.follow());
    // A banner above or a longer message below takes space, and a formula grows when it is typeset:
    // the end stays visible.
    const observer = new ResizeObserver(() => this.#keepUp());
    observer.observe(this.#scroller);
    observer.observe(this.#log);
  }

  show(conversation, run) {
    this.#conversation = conversation;
    this.#views = conversation.turns.map((turn) => this.#makeView(turn));
    this.#log.replaceChildren(...this.#views.map(({ node }) => node));
    this.update(run);
    this.follow();
  }

  /** Updates the nodes: new turns are added, the last two are rebuilt. */
  update(run) {
    const { turns } = this.#conversation;
    for (const turn of turns.slice(this.#views.length)) {
      const view = this.#makeView(turn);
      this.#views.push(view);
      this.#log.append(view.node);
    }
    for (const [index, view] of this.#views.entries()) {
      const isLast = index === turns.length - 1;
      const isRunning = isLast && run !== null;
      view.update?.({ isRunning, isLast, waiting: run?.waiting ?? "" });
    }
    this.#keepUp();
  }

  /** Updates only the last answer, which grew. */
  updateLast(run) {
    this.#views.at(-1).update?.({ isRunning: true, isLast: true, waiting: run.waiting });
    this.#keepUp();
  }

  /** Goes to the end and stays there. */
  follow() {
    this.#isFollowing = true;
    this.#keepUp();
  }

  #makeView(turn) {
    if (turn.role === "user") return { node: this.#makeQuestion(turn) };
    const actions = this.#actions;
    return new AnswerView(turn, {
      regenerate: () => actions.regenerate(),
      resume: () => actions.resume(),
      setResult: (call, text) => actions.setResult(call, text),
      showAnswer: (index) => actions.showAnswer(turn, index),
    });
  }

  #makeQuestion(turn) {
    return element(
      "article",
      { class: "question", "aria-label": "You" },
      element("h2", { class: "visually-hidden" }, "You"),
      element("div", { class: "question-text" }, turn.content),
      element(
        "footer",
        { class: "question-foot" },
        copyButton("Copy message", () => turn.content),
        iconButton("pencil", "Edit and ask again", () => this.#actions.edit(turn)),
      ),
    );
  }

  #distance() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    return scrollHeight - scrollTop - clientHeight;
  }

  #noteScroll() {
    this.#isFollowing = this.#distance() < FOLLOW_PIXELS;
    this.#latest.hidden = this.#isFollowing;
  }

  #keepUp() {
    if (this.#isFollowing) this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#latest.hidden = this.#isFollowing || this.#distance() < FOLLOW_PIXELS;
  }
}
