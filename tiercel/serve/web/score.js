/**
 * The second tab: scores a list against a query.
 *
 * With labels it requests /v1/score for their probabilities after each item; without labels,
 * /v1/rerank for the relevance of each item to the query. Items are shown best first, by the first
 * label.
 */

import { sendJson } from "./api.js";
import { element } from "./dom.js";

const find = (id) => document.getElementById(id);

/** Makes the two tabs, with arrow keys; returns a function that opens one by its name. */
export function setUpTabs() {
  const tabs = ["chat", "score"].map((name) => ({
    name,
    tab: find(`${name}-tab`),
    panel: find(name),
  }));
  const open = (chosen) => {
    for (const { name, tab, panel } of tabs) {
      const isOpen = name === chosen;
      tab.setAttribute("aria-selected", String(isOpen));
      tab.tabIndex = isOpen ? 0 : -1;
      panel.hidden = !isOpen;
    }
    document.body.classList.toggle("is-scoring", chosen === "score");
  };
  tabs.forEach(({ name, tab }, index) => {
    tab.addEventListener("click", () => open(name));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = tabs[1 - index];
      open(other.name);
      other.tab.focus();
    });
  });
  return open;
}

function failedRows(answer) {
  return (answer.errors ?? []).map(({ index, message }) => ({ index, problem: message }));
}

export class ScorePanel {
  #keyring;
  #model;
  #running = null; // the AbortController of the running request

  /** `model` returns the chosen model's name. */
  constructor(keyring, model) {
    this.#keyring = keyring;
    this.#model = model;
    find("score-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#run();
    });
    find("score-stop").addEventListener("click", () => this.#running?.abort());
  }

  async #run() {
    if (this.#running) return;
    const query = find("score-query").value.trimEnd();
    const items = find("score-items").value.split("\n").filter((line) => line.trim());
    if (!query.trim()) return this.#refuse("score-query", "Write a query first.");
    if (!items.length) return this.#refuse("score-items", "Write at least one item.");
    const labels = find("score-labels").value.split(",").filter((label) => label.trim());
    this.#running = new AbortController();
    this.#show("Scoring…");
    const start = performance.now();
    try {
      const rows = await this.#ask(query, items, labels);
      const seconds = (performance.now() - start) / 1000;
      const speed = `${(items.length / seconds).toFixed(items.length > 10 * seconds ? 0 : 1)} items/s`;
      this.#fill(rows, items, labels);
      const count = `${items.length} item${items.length === 1 ? "" : "s"}`;
      this.#show(`${count} in ${seconds.toFixed(2)} s (${speed})`);
    } catch (error) {
      if (error.name === "AbortError") this.#show("Stopped.");
      else this.#show(error.message, true);
    } finally {
      this.#running = null;
      this.#update();
    }
  }

  /** Rows {index, values} or {index, problem}, best first. */
  async #ask(query, items, labels) {
    const model = this.#model();
    if (labels.length) {
      const options = { apply_softmax: true, long_items: "skip" };
      const body = { model, query: `${query}\n`, items, labels, ...options };
      const answer = await this.#send("v1/score", body);
      const failed = failedRows(answer);
      const isScored = (row) => failed.every(({ index }) => index !== row.index);
      const rows = answer.scores.map((values, index) => ({ index, values })).filter(isScored);
      rows.sort((a, b) => b.values[0] - a.values[0] || a.index - b.index);
      return [...rows, ...failed];
    }
    const answer = await this.#send("v1/rerank", { model, query, documents: items });
    const rows = answer.results.map((one) => ({ index: one.index, values: [one.relevance_score] }));
    return [...rows, ...failedRows(answer)];
  }

  /** Sends until the server accepts the key or the user gives up. */
  async #send(path, body) {
    const { signal } = this.#running;
    for (;;) {
      try {
        return await sendJson(path, body, { key: this.#keyring.key, signal });
      } catch (error) {
        if (error.kind !== "unauthorized" || (await this.#keyring.ask()) === null) throw error;
      }
    }
  }

  #refuse(id, text) {
    this.#show(text, true);
    find(id).focus();
  }

  #show(text, isProblem = false) {
    find("score-state").textContent = text;
    find("score-state").classList.toggle("problem", isProblem);
    this.#update();
  }

  #update() {
    find("score-run").disabled = this.#running !== null;
    find("score-stop").hidden = this.#running === null;
  }

  #fill(rows, items, labels) {
    const table = find("score-table");
    const names = labels.length ? labels.map((label) => label.trim()) : ["Relevance"];
    const heads = ["#", ...names, "Item"].map((name) => element("th", { scope: "col" }, name));
    table.tHead.replaceChildren(element("tr", {}, ...heads));
    table.tBodies[0].replaceChildren(...rows.map((row) => this.#row(row, items, names.length)));
    table.hidden = false;
  }

  #row({ index, values, problem }, items, width) {
    const number = element("td", { class: "number" }, String(index + 1));
    const text = element("td", { class: "text" }, items[index]);
    if (problem !== undefined) {
      return element("tr", {}, number, element("td", { colspan: width }, problem), text);
    }
    const cells = values.map((value, place) => {
      const cell = element("td", { class: "number" }, value.toFixed(4));
      if (place === 0) cell.append(element("meter", { value, min: 0, max: 1, "aria-hidden": "true" }));
      return cell;
    });
    return element("tr", {}, number, ...cells, text);
  }
}
