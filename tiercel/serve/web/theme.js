// A classic script in the head: the chosen theme must be there before the first paint.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("tiercel.theme");
  } catch {
    // Storage is switched off: use the system's theme.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
