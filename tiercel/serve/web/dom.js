/**
 * Builds nodes.
 *
 * Strings become text nodes or attribute values, never markup: no module of this page parses HTML,
 * so text of a model, a server or an imported file can only be shown.
 */

/** Makes an element; a property that is a function listens to the event of that name. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Copies an icon out of the template in the page. */
export function icon(name) {
  const icons = document.getElementById("icons").content;
  return icons.querySelector(`[data-name="${name}"]`).cloneNode(true);
}

/** A button that shows an icon and says its name to screen readers and on hover. */
export function iconButton(name, label, click, className = "icon-button") {
  const properties = { type: "button", class: className, "aria-label": label, title: label, click };
  return element("button", properties, icon(name));
}

/** A button with an icon and words. */
export function textButton(name, label, click, className = "button") {
  return element("button", { type: "button", class: className, click }, icon(name), label);
}

/** Changes text only if it differs, so that selections and live regions are not disturbed. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Puts text on the clipboard; returns whether it worked. */
export async function copyText(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      return false;
    }
  }
  // Pages that came over plain HTTP from another machine have no clipboard object.
  const field = element("textarea", { class: "visually-hidden", readonly: true });
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  return copied;
}

/** A button that copies the text of `read` and shows so for a moment. */
export function copyButton(label, read) {
  const button = iconButton("copy", label, async () => {
    const copied = await copyText(read());
    button.replaceChildren(icon(copied ? "check" : "cross"));
    button.setAttribute("aria-label", copied ? "Copied" : "Copying failed");
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.setAttribute("aria-label", label);
    }, 1600);
  });
  return button;
}
