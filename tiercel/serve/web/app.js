/**
 * The page: connects its modules, and handles its buttons and keys.
 *
 * Where to read on: chat.js runs answers, answer.js is their data, view.js shows them, store.js
 * keeps them, api.js and server.js talk to the server, markdown.js turns text into nodes. score.js
 * is the tab that scores a list.
 */

import { Chat, appended } from "./chat.js";
import { element, icon, setText } from "./dom.js";
import { Panels, Toast, downloadFile, setUpTheme } from "./layout.js";
import { ScorePanel, setUpTabs } from "./score.js";
import { Keyring, Server } from "./server.js";
import { Settings } from "./settings.js";
import { HistoryList } from "./sidebar.js";
import { ConversationStore, Storage, newConversation, titleOf } from "./store.js";
import { ConversationView, noteOf } from "./view.js";

const CURRENT_KEY = "tiercel.current";

const find = (id) => document.getElementById(id);

class App {
  #storage = new Storage();
  #store = new ConversationStore(this.#storage);
  #keyring = new Keyring();
  #server = new Server(this.#keyring);
  #chat;
  #view;
  #history;
  #settings;
  #panels = new Panels();
  #toast = new Toast();
  #openTab;
  #current = newConversation();
  #edited = null; // the question that the next message replaces
  #frame = 0; // the animation frame that will show new text of an answer
  #prompt = find("prompt");

  start() {
    this.#fillIcons();
    setUpTheme(this.#storage);
    this.#openTab = setUpTabs();
    new ScorePanel(this.#keyring, () => find("model").value);
    this.#settings = new Settings(this.#storage, (text) => this.#setSystem(text));
    this.#history = new HistoryList({
      open: (id) => this.#open(id),
      rename: (id, title) => this.#rename(id, title),
      exportOne: (id) => this.#export([this.#store.get(id)]),
      remove: (id) => this.#remove(id),
    });
    this.#view = new ConversationView({
      regenerate: () => this.#ask(),
      resume: () => this.#resume(),
      setResult: (call, text) => this.#setResult(call, text),
      showAnswer: (turn, index) => this.#showAnswer(turn, index),
      edit: (turn) => this.#edit(turn),
    });
    this.#chat = new Chat(this.#server, this.#keyring, this.#store, {
      grown: (conversation) => this.#grown(conversation),
      changed: (conversation) => this.#changed(conversation),
      ended: (conversation, end) => this.#ended(conversation, end),
    });
    this.#listen();
    const last = this.#store.get(this.#storage.read(CURRENT_KEY) ?? "");
    this.#show(last ?? this.#current);
    if (!this.#storage.isLasting) {
      this.#toast.show("This browser keeps no data for this page: history ends with the tab.");
    }
    this.#server.check();
  }

  #fillIcons() {
    for (const slot of document.querySelectorAll("[data-icon]")) {
      slot.prepend(icon(slot.dataset.icon));
    }
  }

  #listen() {
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    this.#prompt.addEventListener("input", () => this.#updateComposer());
    find("stop").addEventListener("click", () => this.#stop());
    find("cancel-edit").addEventListener("click", () => this.#endEdit(true));
    for (const button of document.querySelectorAll("[data-new-chat]")) {
      button.addEventListener("click", () => this.#startNew());
    }
    find("export").addEventListener("click", () => this.#export(this.#store.list()));
    find("import").addEventListener("click", () => find("import-file").click());
    find("import-file").addEventListener("change", (event) => this.#takeFiles(event.target));
    find("server-action").addEventListener("click", () => this.#reconnect());
    find("forget-key").addEventListener("click", () => this.#forgetKey());
    find("model").addEventListener("change", () => this.#modelChosen());
    for (const button of document.querySelectorAll("[data-suggestion]")) {
      button.addEventListener("click", () => this.#suggest(button.dataset.suggestion));
    }
    document.addEventListener("keydown", (event) => this.#escape(event));
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.#server.check();
    });
    this.#server.addEventListener("change", () => this.#serverChanged());
    window.addEventListener("pagehide", () => this.#leave());
    window.addEventListener("storage", (event) => this.#storageChanged(event));
  }

  // --- actions of the user ---

  #send() {
    const text = this.#prompt.value.trim();
    if (!text || this.#chat.runOf(this.#current)) return;
    if (!this.#requestOptions()) return;
    const conversation = this.#current;
    if (this.#edited) this.#cutAt(this.#edited);
    conversation.turns.push({ role: "user", content: text });
    if (!conversation.isNamed && conversation.turns.length === 1) {
      conversation.title = titleOf(text);
    }
    this.#prompt.value = "";
    this.#endEdit(false);
    this.#ask();
  }

  /** Generates an answer in the current conversation: after a new question, or again. */
  #ask() {
    const options = this.#requestOptions();
    if (!options || this.#chat.runOf(this.#current)) return;
    this.#view.follow();
    this.#prompt.focus();
    this.#chat.answer(this.#current, options);
  }

  #resume() {
    if (!this.#requestOptions()) return;
    appended(this.#current);
    this.#ask();
  }

  /** Model, sampling and tools; null, with the wrong field in focus, if a setting is wrong. */
  #requestOptions() {
    const { body, problem } = this.#settings.read();
    if (problem) {
      this.#panels.open("settings");
      problem.focus();
      return null;
    }
    const model = find("model").value;
    return model ? { model, ...body } : body;
  }

  #stop() {
    this.#chat.stop(this.#current);
    this.#prompt.focus();
  }

  #escape(event) {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    if (this.#panels.closeOverlay()) return;
    if (this.#chat.runOf(this.#current)) this.#stop();
    else if (this.#edited) this.#endEdit(true);
  }

  #edit(turn) {
    if (this.#chat.runOf(this.#current)) return;
    this.#edited = turn;
    this.#prompt.value = turn.content;
    find("edit-note").hidden = false;
    this.#updateComposer();
    this.#prompt.focus();
  }

  #endEdit(isCancelled) {
    if (this.#edited && isCancelled) this.#prompt.value = "";
    this.#edited = null;
    find("edit-note").hidden = true;
    this.#updateComposer();
    if (isCancelled) this.#prompt.focus();
  }

  #cutAt(turn) {
    const conversation = this.#current;
    const before = conversation.turns;
    conversation.turns = before.slice(0, before.indexOf(turn));
    this.#view.show(conversation, null);
    this.#toast.show("What followed the edited message was removed.", "Undo", () => {
      this.#chat.stop(conversation);
      conversation.turns = before;
      if (conversation === this.#current) this.#view.show(conversation, null);
      this.#changed(conversation);
    });
  }

  #setResult(call, text) {
    call.result = text;
    this.#save(this.#current);
  }

  #showAnswer(turn, index) {
    turn.shown = index;
    this.#changed(this.#current);
  }

  #suggest(text) {
    this.#prompt.value = text;
    this.#updateComposer();
    this.#prompt.focus();
  }

  #setSystem(text) {
    this.#current.system = text;
    if (this.#current.turns.length) this.#save(this.#current);
  }

  // --- conversations ---

  #startNew() {
    this.#openTab("chat");
    this.#show(newConversation());
    this.#panels.closeOverlay();
    this.#prompt.focus();
  }

  #open(id) {
    const conversation = this.#store.get(id);
    if (conversation) this.#show(conversation);
    this.#openTab("chat");
    this.#panels.closeOverlay();
  }

  #show(conversation) {
    if (this.#edited) this.#endEdit(true);
    this.#current = conversation;
    this.#storage.write(CURRENT_KEY, conversation.id);
    this.#settings.showSystem(conversation.system);
    this.#view.show(conversation, this.#chat.runOf(conversation));
    this.#update();
  }

  #rename(id, title) {
    const conversation = this.#store.get(id);
    if (conversation && title !== conversation.title) {
      conversation.title = title;
      conversation.isNamed = true;
      this.#save(conversation);
    }
    this.#update();
  }

  #remove(id) {
    const conversation = this.#store.get(id);
    if (!conversation) return;
    this.#chat.stop(conversation);
    this.#store.remove(id);
    if (conversation === this.#current) this.#show(newConversation());
    else this.#update();
    this.#toast.show(`Deleted “${conversation.title}”.`, "Undo", () => {
      this.#save(conversation);
      this.#show(conversation);
    });
  }

  #export(conversations) {
    const day = new Date().toISOString().slice(0, 10);
    downloadFile(`tiercel-conversations-${day}.json`, ConversationStore.exported(conversations));
  }

  async #takeFiles(field) {
    const results = [];
    for (const file of field.files) results.push(await this.#store.take(file));
    field.value = "";
    const errors = results.map(({ error }) => error).filter(Boolean);
    const added = results.reduce((sum, result) => sum + result.added, 0);
    const unsaved = results.reduce((sum, result) => sum + result.unsaved, 0);
    const words = [...errors, `${added} conversation${added === 1 ? "" : "s"} imported.`];
    if (unsaved) words.push(`${unsaved} did not fit into the browser’s storage.`);
    this.#toast.show(words.join(" "));
    this.#update();
  }

  #save(conversation) {
    if (this.#store.save(conversation)) return;
    this.#toast.show("The browser’s storage is full: export and delete old conversations.");
  }

  #leave() {
    this.#chat.leave();
    for (const id of this.#chat.runningIds) {
      const conversation = this.#store.get(id);
      if (conversation) this.#store.save(conversation);
    }
  }

  /** Another tab has written or removed a conversation. */
  #storageChanged(event) {
    const id = ConversationStore.idOf(event.key);
    if (id === null || this.#chat.runningIds.has(id)) return;
    this.#store.reload(id);
    const present = this.#store.get(id);
    if (present && id === this.#current.id) this.#show(present);
    else this.#update();
  }

  // --- events of answers ---

  #changed(conversation) {
    conversation.updated = Date.now();
    this.#save(conversation);
    if (conversation === this.#current) this.#view.update(this.#chat.runOf(conversation));
    this.#update();
  }

  #grown(conversation) {
    if (conversation !== this.#current || this.#frame) return;
    this.#frame = requestAnimationFrame(() => {
      this.#frame = 0;
      const run = this.#chat.runOf(this.#current);
      if (!run) return;
      this.#view.updateLast(run);
      setText(find("announcer"), run.notice);
    });
  }

  #ended(conversation, end) {
    if (this.#store.get(conversation.id) !== conversation) return; // Deleted meanwhile.
    this.#changed(conversation);
    if (conversation !== this.#current) return;
    find("announcer").textContent = noteOf(end)?.text ?? "Answer complete.";
  }

  // --- around the conversation ---

  #update() {
    const conversation = this.#current;
    const run = this.#chat.runOf(conversation);
    const isRunning = run !== null;
    const isEmpty = conversation.turns.length === 0;
    find("title").textContent = conversation.title;
    find("title").title = conversation.title; // whole where its end is cut
    document.title = isEmpty ? "Tiercel" : `${conversation.title} – Tiercel`;
    find("welcome").hidden = !isEmpty;
    find("stop").hidden = !isRunning;
    find("send").hidden = isRunning;
    if (isRunning) setText(find("announcer"), run.notice);
    document.body.classList.toggle("is-running", isRunning);
    document.body.classList.toggle("is-empty", isEmpty);
    this.#history.show(this.#store.list(), conversation.id, this.#chat.runningIds);
    find("export").disabled = this.#store.list().length === 0;
    find("forget-key").hidden = !this.#keyring.key;
    this.#updateComposer();
  }

  #updateComposer() {
    find("send").disabled = !this.#prompt.value.trim();
    if (CSS.supports("field-sizing", "content")) return;
    this.#prompt.style.height = "auto";
    this.#prompt.style.height = `${this.#prompt.scrollHeight}px`;
  }

  // --- the server ---

  #serverChanged() {
    const { status, progress, models } = this.#server;
    const percent = progress === null ? "" : ` ${Math.round(progress * 100)} %`;
    const words = {
      loading: `The model is loading…${percent}`,
      restarting: `The engine is restarting…${percent}`,
      draining: "The server is shutting down and takes no new messages.",
      unreachable: "The server does not answer. Trying again every second…",
      locked: "This server asks for an API key.",
    };
    const text = words[status] ?? "";
    find("server-banner").hidden = !text;
    find("server-message").textContent = text;
    find("server-progress").hidden = progress === null || status === "ready";
    find("server-progress").value = progress ?? 0;
    find("server-action").hidden = status !== "locked";
    find("server-state").dataset.status = status;
    find("server-state").setAttribute("aria-label", `Server: ${status}`);
    if (status === "ready") this.#showModels(models);
    if (status === "locked") this.#reconnect();
    this.#update();
  }

  /** Asks for the key until the server accepts it or the user gives up. */
  async #reconnect() {
    while (this.#server.status === "locked" && (await this.#keyring.ask()) !== null) {
      await this.#server.check();
    }
    this.#update();
  }

  #forgetKey() {
    this.#keyring.forget();
    this.#toast.show("The key is forgotten.");
    this.#update();
  }

  #modelChosen() {
    const select = find("model");
    select.title = select.value; // whole where its end is cut
    const chosen = this.#server.models.find(({ id }) => id === select.value);
    if (chosen) this.#settings.showDefaults(chosen.samplingDefaults);
  }

  #showModels(models) {
    const select = find("model");
    const chosen = select.value;
    select.replaceChildren(...models.map(({ id }) => element("option", { value: id }, id)));
    if (models.some(({ id }) => id === chosen)) select.value = chosen;
    select.disabled = models.length < 2;
    select.hidden = models.length === 0;
    this.#modelChosen();
    const { id, contextTokens } = models[0] ?? {};
    const size = contextTokens?.toLocaleString("en");
    const context = size ? ` with ${size} tokens of context` : "";
    find("welcome-model").textContent = id ? `You are talking to ${id}${context}.` : "";
  }
}

new App().start();
