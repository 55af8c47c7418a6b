// This script runs in the head, so the first paint already shows the reader's choices: the diff view and the result.
const chosen = document.head.appendChild(document.createElement("style"))

function remembered(name) {
  try {
    return localStorage.getItem(`ladder.${name}`) ?? ""
  } catch {
    return "" // the browser blocks storage
  }
}

function show(name, value) {
  document.documentElement.dataset[name] = value
  if (name !== "result") return
  const others = value ? `.result:not([data-result="${CSS.escape(value)}"])` : ".result ~ .result"
  chosen.textContent = `${others} { display: none }`
}

for (const name of ["view", "result"]) show(name, remembered(name))

// settle() also runs on pageshow, because the back button may restore a page with older choices.
function settle() {
  for (const choice of document.querySelectorAll("[data-choice]")) {
    const name = choice.dataset.choice
    const inputs = [...choice.querySelectorAll("input")]
    const input = inputs.find((input) => input.value === remembered(name)) ?? inputs[0]
    input.checked = true
    show(name, input.value)
  }
}

addEventListener("pageshow", settle)
document.addEventListener("DOMContentLoaded", () => {
  settle()
  for (const choice of document.querySelectorAll("[data-choice]")) {
    choice.addEventListener("change", (event) => {
      show(choice.dataset.choice, event.target.value)
      try {
        localStorage.setItem(`ladder.${choice.dataset.choice}`, event.target.value)
      } catch {}
    })
  }

  // The file name of a comparison page lists the two scripts in ladder order.
  for (const form of document.querySelectorAll("form.compare")) {
    form.addEventListener("change", () => form.after.setCustomValidity(""))
    form.addEventListener("submit", (event) => {
      event.preventDefault()
      const [low, high] = [form.before, form.after].sort((a, b) => a.selectedIndex - b.selectedIndex)
      if (low.value !== high.value) return location.assign(`${form.dataset.folder}${low.value}--${high.value}.html`)
      form.after.setCustomValidity("Choose two different scripts.")
      form.after.reportValidity()
    })
  }

  // After a search, the theme marks the matches on the page. Unfold the sections that contain a match.
  if (!new URLSearchParams(location.search).has("h")) return
  new MutationObserver(() => {
    for (const mark of document.querySelectorAll("details:not([open]) mark")) mark.closest("details").open = true
  }).observe(document.body, { childList: true, subtree: true })
})
