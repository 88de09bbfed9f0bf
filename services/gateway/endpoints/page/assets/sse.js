// Server-sent events in the body of a response.

// Yields, each time that bytes arrive, a list of the events that are now complete, which may be
// empty. An event has `data`, and `name` if it was sent with one.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    yield events.map(parse).filter((one) => one.data !== undefined);
  }
}

// A comment keeps the connection alive and has no data.
function parse(event) {
  const [, name, data] = /^(?:event: (\w+)\n)?data: (.*)$/s.exec(event) || [];
  return { name, data };
}
