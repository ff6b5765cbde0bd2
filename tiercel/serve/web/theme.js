// A classic script in the head: the chosen theme must be there before the first paint.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("tiercel.theme");
  } catch {
    // Storage is switched off: the system's theme it is.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
