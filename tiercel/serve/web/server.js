/**
 * State of the server: whether it is ready, its models, and the API key.
 *
 * While the server is not ready, the page polls it; after that not until a request fails or the
 * user comes back to the page.
 */

import { readModels, readReady } from "./api.js";

const POLL_MS = 1000;
const KEY_ITEM = "tiercel.key";

/** Watches /ready and /v1/models; sends "change" events. */
export class Server extends EventTarget {
  status = "connecting"; // ready, loading, restarting, draining, unreachable, locked
  progress = null; // 0 to 1 while loading
  models = [];
  #keyring;
  #checking = null;
  #timer = null;

  constructor(keyring) {
    super();
    this.#keyring = keyring;
  }

  get isStarting() {
    return this.status === "loading" || this.status === "restarting";
  }

  /** Polls now; concurrent calls share one result. */
  check() {
    clearTimeout(this.#timer);
    this.#checking ??= this.#ask().finally(() => {
      this.#checking = null;
      const isSettled = this.status === "ready" || this.status === "locked";
      if (!isSettled) this.#timer = setTimeout(() => this.check(), POLL_MS);
    });
    return this.#checking;
  }

  async #ask() {
    try {
      const { status, progress } = await readReady();
      if (status === "ready" && !this.models.length) {
        this.models = await readModels(this.#keyring.key);
      }
      this.#set(status, progress);
    } catch (error) {
      // A server that cannot list its models will report an error when a message is sent.
      const states = { unauthorized: "locked", unreachable: "unreachable" };
      this.#set(states[error.kind] ?? "ready", null);
    }
  }

  #set(status, progress) {
    if (status === this.status && progress === this.progress) return;
    if (status !== "ready") this.models = []; // A server that comes back may serve another model.
    this.status = status;
    this.progress = progress;
    this.dispatchEvent(new Event("change"));
  }

  /** Waits until a starting server is ready or unreachable. */
  async whenStarted(signal) {
    while (this.isStarting) {
      await new Promise((resolve, reject) => {
        signal.addEventListener("abort", () => reject(signal.reason), { once: true });
        this.addEventListener("change", resolve, { once: true });
      });
    }
  }
}

/** The key of this browser tab; it is forgotten with the tab. */
export class Keyring {
  #dialog = document.getElementById("key-dialog");
  #field = document.getElementById("key");
  #message = document.getElementById("key-message");
  #error = document.getElementById("key-error");
  #asking = null;
  #key = "";

  constructor() {
    try {
      this.#key = sessionStorage.getItem(KEY_ITEM) ?? "";
    } catch {
      // Storage is switched off: the key lives as long as the page.
    }
    document.getElementById("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#take();
    });
    document.getElementById("key-cancel").addEventListener("click", () => this.#dialog.close());
    this.#field.addEventListener("input", () => this.#showError(""));
  }

  get key() {
    return this.#key;
  }

  forget() {
    this.#store("");
  }

  /** Asks for a key; returns it, or null if the user declines. */
  ask() {
    this.#asking ??= new Promise((resolve) => {
      this.#message.textContent = this.#key
        ? "The server does not accept this key. Check it for missing characters."
        : "This server asks for an API key. Whoever runs it can give you one.";
      this.#field.value = "";
      this.#showError("");
      this.#dialog.returnValue = "";
      this.#dialog.showModal();
      const closed = () => {
        this.#asking = null;
        resolve(this.#dialog.returnValue === "given" ? this.#key : null);
      };
      this.#dialog.addEventListener("close", closed, { once: true });
    });
    return this.#asking;
  }

  #take() {
    const key = this.#field.value.trim();
    if (!/^[\x21-\x7e]+$/.test(key)) {
      this.#showError(key ? "A key has no spaces or special letters." : "Enter a key.");
      this.#field.focus();
      return;
    }
    this.#store(key);
    this.#dialog.close("given");
  }

  #showError(text) {
    this.#error.textContent = text;
    this.#field.setAttribute("aria-invalid", String(text !== ""));
  }

  #store(key) {
    this.#key = key;
    try {
      if (key) sessionStorage.setItem(KEY_ITEM, key);
      else sessionStorage.removeItem(KEY_ITEM);
    } catch {
      // As above: without storage the key lives in memory.
    }
  }
}
