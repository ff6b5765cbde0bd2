/**
 * Runs answers: one per conversation at a time, each goes on when another conversation is shown.
 */

import { ApiError, streamChat } from "./api.js";
import { AnswerBuilder, hasOutput, newAnswer, requestMessages, shownAnswer } from "./answer.js";

const SAVE_MS = 2000; // a running answer is written this often, and when it ends

export class Chat {
  #server;
  #keyring;
  #store;
  #runs = new Map(); // conversation id -> {controller, waiting, savedAt, isLeft}
  #listener;

  /** The listener has grown(conversation), changed(conversation), ended(conversation, end). */
  constructor(server, keyring, store, listener) {
    this.#server = server;
    this.#keyring = keyring;
    this.#store = store;
    this.#listener = listener;
  }

  get runningIds() {
    return new Set(this.#runs.keys());
  }

  runOf(conversation) {
    return this.#runs.get(conversation.id) ?? null;
  }

  stop(conversation) {
    this.runOf(conversation)?.controller.abort();
  }

  /** The page goes away: what breaks from now on was broken by that. */
  leave() {
    for (const run of this.#runs.values()) run.isLeft = true;
  }

  /** Asks for an answer to what the conversation ends with. `options`: model, sampling, tools. */
  async answer(conversation, options) {
    const turn = turnForAnswer(conversation);
    const answer = shownAnswer(turn);
    const earlier = conversation.turns.slice(0, -1);
    const controller = new AbortController();
    const run = { controller, waiting: "", savedAt: performance.now(), isLeft: false };
    this.#runs.set(conversation.id, run);
    this.#listener.changed(conversation);
    const body = {
      ...options,
      messages: requestMessages(conversation.system, earlier),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    try {
      await this.#stream(conversation, run, answer, body);
    } catch (error) {
      answer.end = run.isLeft ? { kind: "interrupted" } : endOf(error);
      if (error instanceof ApiError) this.#server.check();
    } finally {
      this.#runs.delete(conversation.id);
    }
    this.#listener.ended(conversation, answer.end);
  }

  async #stream(conversation, run, answer, body) {
    const { signal } = run.controller;
    this.#wait(conversation, run, "Waiting for the model to start…");
    await this.#server.whenStarted(signal);
    this.#wait(conversation, run, "Waiting for the first token…");
    const builder = new AnswerBuilder(answer, performance.now());
    for await (const chunk of this.#chunks(body, signal)) {
      builder.add(chunk, performance.now());
      this.#listener.grown(conversation);
      if (performance.now() - run.savedAt > SAVE_MS) {
        run.savedAt = performance.now();
        this.#store.save(conversation);
      }
    }
    builder.finish();
  }

  #wait(conversation, run, words) {
    run.waiting = words;
    this.#listener.grown(conversation);
  }

  /** The chunks; where the server wants a key, the reader is asked and the request sent again. */
  async *#chunks(body, signal) {
    for (;;) {
      try {
        yield* streamChat(body, { key: this.#keyring.key, signal });
        return;
      } catch (error) {
        if (error.kind !== "unauthorized" || (await this.#keyring.ask()) === null) throw error;
      }
    }
  }
}

function endOf(error) {
  if (error.name === "AbortError") return { kind: "stopped" };
  if (!(error instanceof ApiError)) {
    console.error(error); // A fault of this page: the reader must not be left waiting all the same.
    const words = { kind: "page", message: "This page has failed.", retryAfter: null };
    return { kind: "failed", error: words };
  }
  const { kind, message, param, retryAfter } = error;
  const words = param && !message.includes(param) ? `${message} (${param})` : message;
  return { kind: "failed", error: { kind, message: words, retryAfter } };
}

/** The turn whose shown answer is to be filled: a new one, or a new version of the last. */
function turnForAnswer(conversation) {
  const last = conversation.turns.at(-1);
  if (last.role === "user") return appended(conversation);
  const answer = shownAnswer(last);
  const isEmpty = !hasOutput(answer) && !answer.reasoning;
  if (isEmpty) last.answers[last.shown] = newAnswer(); // What failed empty is not worth keeping.
  else last.shown = last.answers.push(newAnswer()) - 1;
  return last;
}

/** Adds a turn with an empty answer, and gives it. */
export function appended(conversation) {
  const turn = { role: "assistant", answers: [newAnswer()], shown: 0 };
  conversation.turns.push(turn);
  return turn;
}
