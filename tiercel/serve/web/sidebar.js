/** The list of conversations: choose, rename, export one, delete. */

import { element, iconButton } from "./dom.js";

const DAY_MS = 24 * 60 * 60 * 1000;

/** "Today", "Yesterday", "Last 7 days" or "Earlier". */
function ageOf(time, now) {
  const midnight = new Date(now).setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY_MS) return "Yesterday";
  return time >= midnight - 7 * DAY_MS ? "Last 7 days" : "Earlier";
}

function answeringMark() {
  return element("span", { class: "pulse", role: "img", "aria-label": "answering" });
}

export class HistoryList {
  #container = document.getElementById("history");
  #actions;
  #renaming = null; // id of the conversation whose title is being edited

  /** Actions: open(id), rename(id, title), exportOne(id), remove(id). */
  constructor(actions) {
    this.#actions = actions;
  }

  show(conversations, currentId, runningIds) {
    if (this.#renaming !== null) return; // A field that is being edited stays.
    const focused = document.activeElement?.dataset?.conversation;
    const groups = Map.groupBy(conversations, ({ updated }) => ageOf(updated, Date.now()));
    const sections = [...groups].map(([age, members]) =>
      element(
        "section",
        { "aria-label": age },
        element("h2", {}, age),
        element(
          "ul",
          {},
          ...members.map((conversation) => {
            const isCurrent = conversation.id === currentId;
            return this.#makeItem(conversation, isCurrent, runningIds.has(conversation.id));
          }),
        ),
      ),
    );
    if (!sections.length) sections.push(element("p", { class: "quiet" }, "Nothing here yet."));
    this.#container.replaceChildren(...sections);
    if (focused) this.#buttonOf(focused)?.focus();
  }

  #buttonOf(id) {
    return this.#container.querySelector(`[data-conversation="${id}"]`);
  }

  #makeItem(conversation, isCurrent, isRunning) {
    const { id, title } = conversation;
    const open = element(
      "button",
      {
        type: "button",
        class: "history-open",
        "data-conversation": id,
        "aria-current": isCurrent ? "true" : null,
        title,
        click: () => this.#actions.open(id),
      },
      isRunning ? answeringMark() : null,
      element("span", { class: "history-title" }, title),
    );
    const item = element("li", { class: isCurrent ? "is-current" : null }, open);
    const tools = [
      iconButton("pencil", `Rename ${title}`, () => this.#rename(item, conversation)),
      iconButton("download", `Export ${title}`, () => this.#actions.exportOne(id)),
      iconButton("trash", `Delete ${title}`, () => this.#actions.remove(id)),
    ];
    item.append(element("div", { class: "history-tools" }, ...tools));
    return item;
  }

  #rename(item, { id, title }) {
    const field = element("input", { class: "history-rename", "aria-label": "New title" });
    field.value = title;
    this.#renaming = id;
    const finish = (isKept) => {
      if (this.#renaming !== id) return;
      this.#renaming = null;
      this.#actions.rename(id, isKept && field.value.trim() ? field.value.trim() : title);
      this.#buttonOf(id)?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Enter") finish(true);
      if (event.key === "Escape") {
        event.stopPropagation(); // Escape here does not stop an answer.
        finish(false);
      }
    });
    field.addEventListener("blur", () => finish(true));
    item.replaceChildren(field);
    field.select();
  }
}
