/**
 * Conversations in the browser's local storage, one key each, and as JSON files.
 *
 * Data from storage or from a file is checked field by field: both can hold anything.
 */

const PREFIX = "tiercel.conversation.";
const FILE_FORMAT = "tiercel-conversations";
const FILE_VERSION = 1;
const MAX_FILE_BYTES = 64 * 1024 * 1024;
const TITLE_CHARACTERS = 200; // elements that show a title cut it to their own width
const ANSWER_ENDS = ["done", "stopped", "interrupted", "failed"];

/** A random name; crypto.randomUUID does not exist on pages that came over plain HTTP. */
function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation() {
  const now = Date.now();
  const title = "New conversation";
  return { id: newId(), title, isNamed: false, created: now, updated: now, system: "", turns: [] };
}

/** The first line of a question, as a title. */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  const letters = Array.from(line);
  if (letters.length <= TITLE_CHARACTERS) return line;
  return `${letters.slice(0, TITLE_CHARACTERS - 1).join("").trimEnd()}…`;
}

/** Local storage, or memory if the browser has none. Writing returns whether it worked. */
export class Storage {
  #memory = new Map();
  #area = null;

  constructor() {
    try {
      this.#area = window.localStorage;
      this.#area.getItem(PREFIX);
    } catch {
      this.#area = null;
    }
  }

  get isLasting() {
    return this.#area !== null;
  }

  read(key) {
    return this.#area ? this.#area.getItem(key) : this.#memory.get(key) ?? null;
  }

  readObject(key) {
    try {
      const value = JSON.parse(this.read(key) ?? "null");
      return value !== null && typeof value === "object" ? value : null;
    } catch {
      return null;
    }
  }

  write(key, text) {
    if (!this.#area) {
      this.#memory.set(key, text);
      return true;
    }
    try {
      this.#area.setItem(key, text);
      return true;
    } catch {
      return false; // The browser's quota is used up.
    }
  }

  remove(key) {
    if (this.#area) this.#area.removeItem(key);
    else this.#memory.delete(key);
  }

  keys() {
    return this.#area ? Object.keys(this.#area) : [...this.#memory.keys()];
  }
}

/** All conversations, newest first. */
export class ConversationStore {
  #storage;
  #all = new Map();

  constructor(storage) {
    this.#storage = storage;
    for (const key of storage.keys()) {
      if (key.startsWith(PREFIX)) this.reload(ConversationStore.idOf(key));
    }
  }

  /** The id of the conversation that is stored under a key, or null. */
  static idOf(key) {
    return key?.startsWith(PREFIX) ? key.slice(PREFIX.length) : null;
  }

  /** Reads one conversation again: another tab has written or removed it. */
  reload(id) {
    const conversation = checkedConversation(this.#storage.readObject(PREFIX + id));
    if (conversation?.id === id) this.#all.set(id, conversation);
    else this.#all.delete(id);
  }

  list() {
    return [...this.#all.values()].sort((a, b) => b.updated - a.updated);
  }

  get(id) {
    return this.#all.get(id) ?? null;
  }

  /** Writes a conversation; false when the browser's storage is full. */
  save(conversation) {
    this.#all.set(conversation.id, conversation);
    return this.#storage.write(PREFIX + conversation.id, JSON.stringify(conversation));
  }

  remove(id) {
    this.#all.delete(id);
    this.#storage.remove(PREFIX + id);
  }

  /** The text of a file that holds these conversations. */
  static exported(conversations) {
    const content = { format: FILE_FORMAT, version: FILE_VERSION, conversations };
    return `${JSON.stringify(content, null, 2)}\n`;
  }

  /** Imports the conversations of a file; returns {added, unsaved, error}. */
  async take(file) {
    const { conversations, error } = await readFile(file);
    if (error) return { added: 0, unsaved: 0, error };
    let added = 0;
    let unsaved = 0;
    for (const conversation of conversations) {
      const present = this.get(conversation.id);
      if (present && JSON.stringify(present) === JSON.stringify(conversation)) continue;
      if (present) conversation.id = newId();
      if (!this.save(conversation)) unsaved += 1;
      added += 1;
    }
    return { added, unsaved, error: null };
  }
}

async function readFile(file) {
  if (file.size > MAX_FILE_BYTES) return { error: `${file.name} is larger than 64 MiB.` };
  let content = null;
  try {
    content = JSON.parse(await file.text());
  } catch {
    return { error: `${file.name} is not a JSON file.` };
  }
  if (content?.format !== FILE_FORMAT || !Array.isArray(content.conversations)) {
    return { error: `${file.name} holds no conversations of Tiercel.` };
  }
  if (content.version !== FILE_VERSION) {
    return { error: `${file.name} was written by a newer version.` };
  }
  const conversations = content.conversations.map(checkedConversation).filter(Boolean);
  const lost = content.conversations.length - conversations.length;
  if (lost) return { error: `${file.name} is damaged: ${lost} conversation(s) cannot be read.` };
  return { conversations, error: null };
}

function isObject(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

function text(value) {
  return typeof value === "string" ? value : "";
}

function finite(value) {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

/** A conversation rebuilt from untrusted data, or null. */
function checkedConversation(value) {
  if (!isObject(value) || !Array.isArray(value.turns)) return null;
  if (!/^[0-9a-f]{24}$/.test(text(value.id))) return null;
  const turns = value.turns.map(checkedTurn);
  if (turns.includes(null)) return null;
  return {
    id: value.id,
    title: text(value.title) || "Untitled",
    isNamed: value.isNamed === true,
    created: finite(value.created) ?? 0,
    updated: finite(value.updated) ?? 0,
    system: text(value.system),
    turns,
  };
}

function checkedTurn(value) {
  if (!isObject(value)) return null;
  if (value.role === "user") return { role: "user", content: text(value.content) };
  if (value.role !== "assistant" || !Array.isArray(value.answers)) return null;
  const answers = value.answers.map(checkedAnswer);
  if (!answers.length || answers.includes(null)) return null;
  const shown = Number.isInteger(value.shown) && value.shown in answers ? value.shown : 0;
  return { role: "assistant", answers, shown };
}

function checkedAnswer(value) {
  if (!isObject(value)) return null;
  const calls = Array.isArray(value.toolCalls) ? value.toolCalls.filter(isObject) : [];
  return {
    content: text(value.content),
    reasoning: text(value.reasoning),
    toolCalls: calls.map((call) => ({
      id: text(call.id),
      name: text(call.name),
      arguments: text(call.arguments),
      result: text(call.result),
    })),
    end: checkedEnd(value.end),
    stats: checkedStats(value.stats),
  };
}

function checkedEnd(value) {
  // An answer that was running when it was written has been interrupted.
  if (!isObject(value) || !ANSWER_ENDS.includes(value.kind)) return { kind: "interrupted" };
  if (value.kind === "done") return { kind: "done", reason: text(value.reason) || "stop" };
  if (value.kind !== "failed") return { kind: value.kind };
  const error = isObject(value.error) ? value.error : {};
  return {
    kind: "failed",
    error: {
      kind: text(error.kind),
      message: text(error.message),
      retryAfter: finite(error.retryAfter),
    },
  };
}

function checkedStats(value) {
  if (!isObject(value)) return null;
  return {
    tokens: finite(value.tokens),
    firstTokenMs: finite(value.firstTokenMs) ?? 0,
    tokensPerSecond: finite(value.tokensPerSecond),
  };
}
