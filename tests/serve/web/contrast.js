// Reports each visible piece of text whose contrast is below what WCAG 2 AA asks for.
() => {
  const numbers = (color) => {
    const parts = color.match(/[\d.]+/g).map(Number);
    return { rgb: parts.slice(0, 3), alpha: parts[3] ?? 1 };
  };
  const mix = (top, below, share) => top * share + below * (1 - share);
  const over = ({ rgb, alpha }, below) => rgb.map((part, i) => mix(part, below[i], alpha));
  const groundOf = (node) => {
    const layers = [];
    for (let e = node; e; e = e.parentElement) layers.unshift(getComputedStyle(e).backgroundColor);
    return layers.reduce((below, layer) => over(numbers(layer), below), [255, 255, 255]);
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  let checked = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility({ opacityProperty: true })) continue;
    if (node.closest(":disabled, .visually-hidden, template, noscript, option")) continue;
    const ground = groundOf(node);
    const ink = over(numbers(getComputedStyle(node).color), ground);
    const [dark, light] = [luminance(ink), luminance(ground)].sort((a, b) => a - b);
    const ratio = (light + 0.05) / (dark + 0.05);
    checked += 1;
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${text.data.trim().slice(0, 40)}`);
  }
  return { checked, found };
}
