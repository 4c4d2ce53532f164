/** Making elements. Text always goes through textContent: captions, file names and messages are not trusted. */

/**
 * An element with attributes and children (elements, strings, or null).
 * `class`, `text`, `on` ({event: listener}) and `style` ({property: value}) are special; the rest are attributes,
 * where true means present and false or null absent.
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "text") element.textContent = value;
    else if (name === "class") element.className = value;
    else if (name === "style") for (const [key, part] of Object.entries(value)) element.style.setProperty(key, part);
    else attribute(element, name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function attribute(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else element.setAttribute(name, value === true ? "" : String(value));
}

/** Set text only when it differs, so that screen readers and selections are left alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Make the children of `parent` one element per item, in order, keeping those whose key stays.
 * `key(item)` names an item, `make(item)` builds its element, `update(element, item)` brings a kept one up to date.
 */
export function keyed(parent, items, key, make, update = () => {}) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const wanted = items.map((item) => {
    const name = String(key(item));
    let element = known.get(name);
    if (element) {
      known.delete(name);
      update(element, item);
    } else {
      element = make(item);
      element.dataset.key = name;
    }
    return element;
  });
  for (const left of known.values()) left.remove();
  wanted.forEach((element, index) => {
    if (parent.children[index] !== element) parent.insertBefore(element, parent.children[index] ?? null);
  });
}

/** Load the panel's style sheet once. Its place follows this module's, whatever the pack's folder is called. */
export function loadStyles() {
  const id = "safe-scaler-styles";
  if (document.getElementById(id)) return;
  document.head.append(h("link", { id, rel: "stylesheet", href: new URL("../css/panel.css", import.meta.url).href }));
}

/** Whether the element stands on a dark ground: the text's brightness tells, whichever theme set it. */
export function isDark(element) {
  const found = /rgba?\(([\d.]+)[ ,]+([\d.]+)[ ,]+([\d.]+)/.exec(getComputedStyle(element).color);
  if (!found) return true;
  const [red, green, blue] = found.slice(1).map(Number);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 128;
}
