// Uses the plan explorer as a person does: docs/check_pages.py calls this with the page's window.
async (inside, note) => {
  const page = inside.document, $ = id => page.getElementById(`explorer-${id}`);
  const until = async (what, is) => {
    for (let i = 0; i < 200 && !is(); ++i) await new Promise(done => setTimeout(done, 50));
    if (!is()) throw new Error(`${what} did not come; the page says "${$("said").textContent}"`);
  };
  await until("an answer", () => $("said").textContent);
  if ($("form").hidden) return;  // built without em++, and the page says so

  const frames = [$("planner"), $("fixed")], heading = frame => frame.contentDocument?.querySelector("h1")?.textContent || "";
  const lanes = frame => frame.contentDocument?.getElementById("lanes");
  const colours = frame => {
    const canvas = lanes(frame), image = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return new Set(new Uint32Array(image.data.buffer)).size;
  };
  // Shows another batch and waits for its two pictures.
  const see = async (what, act) => {
    const before = frames.map(frame => frame.contentDocument);
    act();
    await until(what, () => frames.every((frame, i) => frame.contentDocument !== before[i] && lanes(frame)?.width > 300));
    for (const frame of frames) if (colours(frame) < 3) note(`${what}: "${heading(frame)}" is not drawn`);
    if (!/^Predicted: .* by the planner, .* by a fixed split/.test($("said").textContent)) note(`${what}: "${$("said").textContent}"`);
  };
  const submit = () => page.querySelector("#explorer-form [type=submit]").click();

  await until("the first plan", () => frames.every(frame => lanes(frame)?.width > 300));
  await see("a typed batch", () => { $("tokens").value = "9000,300,300,12x700"; submit(); });
  await see("another card", () => { $("card").value = "A100"; $("card").dispatchEvent(new Event("change", { bubbles: true })); });
  if (!frames[0].contentDocument.querySelector("pre").textContent.includes("on A100")) note("the plan is not for the A100");
  await see("an example", () => page.querySelector("[data-rows='8x4096']").click());
  if ($("rows").value !== "8x4096") note("an example does not set the rows");
  const canvas = lanes(frames[0]), box = canvas.getBoundingClientRect();
  const point = new PointerEvent("pointermove", { bubbles: true, clientX: box.left + 80, clientY: box.top + 1 });
  canvas.dispatchEvent(point);
  const tip = frames[0].contentDocument.getElementById("tip").textContent;
  if (!/^CTA 0, step \d+ of \d+: request \d+ of 4096 tokens and 4096 rows/.test(tip)) note(`hover shows "${tip}"`);

  $("tokens").value = "many"; submit();
  await until("a refusal", () => $("said").textContent.includes("is not a list of lengths"));
  if (!$("form").classList.contains("wrong")) note("a wrong batch is not marked");
}
