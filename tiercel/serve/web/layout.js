/** The frame around the conversation: side panels, theme, short notices, downloads. */

import { element } from "./dom.js";

const THEME_KEY = "tiercel.theme";
const THEMES = ["system", "light", "dark"];
const TOAST_MS = 8000;
const NARROW = {
  sidebar: "(max-width: 56rem)",
  settings: "(max-width: 80rem)",
};

/** The two side panels: next to the conversation if there is room, else on top of it. */
export class Panels {
  #panels = ["sidebar", "settings"].map((name) => ({
    name,
    node: document.getElementById(name),
    opener: document.getElementById(`open-${name}`),
    isNarrow: window.matchMedia(NARROW[name]),
    isOpen: false,
  }));
  #scrim = document.getElementById("scrim");

  constructor() {
    for (const panel of this.#panels) {
      panel.isOpen = panel.name === "sidebar" && !panel.isNarrow.matches;
      panel.opener.addEventListener("click", () => this.#set(panel, !panel.isOpen, true));
      panel.node.querySelector("[data-close]").addEventListener("click", () => {
        this.#set(panel, false, true);
      });
      panel.isNarrow.addEventListener("change", () => {
        this.#set(panel, panel.name === "sidebar" && !panel.isNarrow.matches, false);
      });
    }
    this.#scrim.addEventListener("click", () => this.closeOverlay());
    this.#apply();
  }

  open(name) {
    this.#set(this.#panels.find((panel) => panel.name === name), true, false);
  }

  /** Closes the panel on top of the conversation; false if there is none. */
  closeOverlay() {
    const panel = this.#overlay();
    if (panel) this.#set(panel, false, true);
    return panel !== undefined;
  }

  #overlay() {
    return this.#panels.find(({ isOpen, isNarrow }) => isOpen && isNarrow.matches);
  }

  #set(panel, isOpen, movesFocus) {
    for (const other of this.#panels) {
      if (isOpen && other !== panel && other.isNarrow.matches) other.isOpen = false;
    }
    panel.isOpen = isOpen;
    this.#apply();
    if (!movesFocus) return;
    if (!isOpen) panel.opener.focus();
    else panel.node.querySelector("[data-close]").focus();
  }

  #apply() {
    const overlay = this.#overlay();
    for (const { node, opener, isOpen } of this.#panels) {
      node.hidden = !isOpen;
      node.inert = overlay !== undefined && overlay.node !== node;
      opener.setAttribute("aria-expanded", String(isOpen));
    }
    document.getElementById("main").inert = overlay !== undefined;
    this.#scrim.hidden = overlay === undefined;
    document.body.classList.toggle("has-sidebar", this.#panels[0].isOpen);
  }
}

/** The button that cycles through system, light and dark. */
export function setUpTheme(storage) {
  const button = document.getElementById("theme");
  const label = document.getElementById("theme-label");
  const apply = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    label.textContent = `Theme: ${theme}`;
  };
  let theme = THEMES.find((name) => name === storage.read(THEME_KEY)) ?? "system";
  apply(theme);
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    storage.write(THEME_KEY, theme);
    apply(theme);
  });
}

/** A short notice with at most one action. */
export class Toast {
  #node = document.getElementById("toast");
  #timer = 0;

  show(text, actionName = null, action = null) {
    clearTimeout(this.#timer);
    const close = () => this.#node.replaceChildren();
    const act = () => {
      close();
      action();
    };
    const button = action
      ? element("button", { type: "button", class: "button quiet", click: act }, actionName)
      : null;
    const words = element("span", {}, text);
    this.#node.replaceChildren(element("div", { class: "toast" }, words, button));
    this.#timer = setTimeout(close, TOAST_MS);
  }
}

/** Downloads a text as a file. */
export function downloadFile(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const anchor = element("a", { href: address, download: name });
  document.body.append(anchor);
  anchor.click();
  anchor.remove();
  URL.revokeObjectURL(address);
}
