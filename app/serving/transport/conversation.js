const DONE = "[DONE]";
const DRAW_MS = 50;  // between two layouts: with one for each token, a fast model would freeze the page
const FIELDS = {max_tokens: "max-tokens", temperature: "temperature", seed: "seed"};
let speaker = null;  // the language model that is asked: its name, and whether it answers chats
let messages = [];  // of the conversation, as the model reads them
let stopping = null;  // stops the answer that comes

/** Show the conversation with a language model; null hides it. Another model begins a new one. */
function converse(model) {
  byId("talk").hidden = !model;
  if (speaker?.id === model?.id && speaker?.has_chat === model?.has_chat) return;
  speaker = model;
  begin();
  if (!model) return;
  byId("message-name").textContent = model.has_chat ? "Message" : "Text";
  byId("message").placeholder = model.has_chat ? "Write a message" : "Write a text, which the model continues";
  byId("send").textContent = model.has_chat ? "Send" : "Continue";
  byId("new").textContent = model.has_chat ? "New conversation" : "Clear";
  byId("max-tokens").value = model.has_chat ? "" : "64";  // the endpoint's default for texts is 16
}

/** Begin a new conversation. */
function begin() {
  stopping?.abort();
  stopping = null;
  messages = [];
  working(false);
  byId("turns").replaceChildren();
  byId("turns").hidden = byId("new").hidden = byId("same").hidden = byId("refused").hidden = true;
}

/** Send what is written, and show the answer as it comes. A message without an answer is given back. */
async function speak() {
  const said = byId("message").value;
  if (stopping || !said.trim()) return;
  const {has_chat: isChat} = speaker;
  const asked = [...messages, {role: "user", content: said}];
  const body = {model: speaker.id, ...(isChat ? {messages: asked} : {prompt: said}), ...settings()};
  const mine = stopping = new AbortController();
  const answer = isChat ? turn("Model", "", "answer") : turn("Text", said, "answer");
  const drawn = isChat ? [turn("You", said, "mine"), answer] : [answer];
  byId("turns").append(...drawn.map((each) => each.element));
  byId("turns").hidden = byId("new").hidden = false;
  byId("refused").hidden = byId("same").hidden = true;
  byId("message").value = "";
  working(true);
  try {
    const text = await receive(isChat ? "v1/chat/completions" : "v1/completions", body, answer, mine.signal);
    if (stopping !== mine) return;  // a new conversation has begun
    if (mine.signal.aborted && !text) throw new Error("Stopped before the first token.");
    if (isChat) messages = [...asked, {role: "assistant", content: text}];
    byId("curl").textContent = curlOf(isChat ? "v1/chat/completions" : "v1/completions", body);
    byId("python").textContent = pythonOf(body);
    byId("same").hidden = false;
  } catch (error) {
    if (stopping !== mine) return;
    if (answer.isEmpty) for (const each of drawn) each.element.remove();
    else answer.note(isChat ? "This answer broke off. It is not part of the conversation." : "This text broke off.");
    byId("message").value ||= said;
    byId("refused").textContent = error.message;
    byId("refused").hidden = false;
  } finally {
    if (stopping === mine) {
      stopping = null;
      working(false);
    }
    look();
  }
}

/** What the fields below the message set; empty ones are the endpoint's to choose. */
function settings() {
  const given = Object.entries(FIELDS).map(([name, id]) => [name, byId(id).value]);
  return Object.fromEntries(given.filter(([, value]) => value !== "").map(([name, value]) => [name, Number(value)]));
}

function working(isWorking) {
  const hadFocus = document.activeElement === byId("stop");
  byId("turns").ariaBusy = String(isWorking);
  byId("stop").hidden = !isWorking;
  byId("send").hidden = isWorking;
  if (hadFocus) byId("message").focus();
}

/** A part of the conversation, to which text is added. */
function turn(who, said, kind) {
  const text = document.createTextNode("");
  let coming = "", timer = null;
  const element = make("li", {className: kind}, make("p", {className: "quiet"}, who),
    make("div", {className: "said"}, ...(kind === "answer" && said ? [make("span", {className: "given"}, said)] : [said]), text));
  const draw = () => {
    clearTimeout(timer);
    const turns = byId("turns");
    const follows = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40;  // unless the reader looks back
    text.appendData(coming);
    coming = "";
    timer = null;
    if (follows) turns.scrollTop = turns.scrollHeight;
  };
  return {
    element,
    get isEmpty() { return !text.data && !coming; },
    add(more) {
      coming += more;
      timer ??= setTimeout(draw, DRAW_MS);
    },
    note(words) {
      draw();
      element.append(make("p", {className: "quiet"}, words));
      byId("turns").scrollTop = byId("turns").scrollHeight;
    },
  };
}

/** Add an answer to its turn as it comes, and return it; what has come by then, if the reader stops it. */
async function receive(path, body, answer, signal) {
  const began = performance.now();
  let first, finish, usage, version, text = "";
  byId("turns").scrollTop = byId("turns").scrollHeight;
  try {
    const asked = {...body, stream: true, stream_options: {include_usage: true}};
    for await (const chunk of events(await send(path, {method: "POST", body: JSON.stringify(asked), signal}))) {
      const choice = chunk.choices[0];
      const more = (choice?.delta ? choice.delta.content : choice?.text) ?? "";
      if (more) first ??= performance.now();
      text += more;
      answer.add(more);
      finish = choice?.finish_reason ?? finish;
      usage = chunk.usage ?? usage;
      version = chunk.system_fingerprint ?? version;
    }
  } catch (error) {
    if (!signal.aborted) throw error;
  }
  if (signal.aborted && !text) return text;
  const now = performance.now();
  answer.note([
    version?.replace("/", ", version "),
    usage && `${number.format(usage.prompt_tokens)} tokens read, ${number.format(usage.completion_tokens)} written`,
    first && `the first after ${milliseconds(first - began)}`,
    signal.aborted ? "stopped" : `complete after ${milliseconds(now - began)}`,
    finish === "length" && "cut at its maximum of tokens",
  ].filter(Boolean).join(", "));
  return text;
}

/** The events of a stream, read as JSON. An Error says how it failed; one without an end has broken off. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      part = {done: true};
    }
    if (part.done) throw new Error("The answer broke off: the endpoint closed the connection. Send it again.");
    const whole = (rest + part.value).split("\n\n");
    rest = whole.pop();
    for (const event of whole) {
      const data = event.replace(/^data: /, "");
      if (data === DONE) return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(reasonOf(chunk));
      yield chunk;
    }
  }
}

/** A command that asks for the same answer, whole. */
function curlOf(path, body) {
  return [...curlTo(path), "-d", quoted(JSON.stringify(body))].join(" ");
}

/** A program that asks for the same answer, as a stream. */
function pythonOf({model, ...given}) {
  const written = Object.entries({model, ...given, stream: true}).map(([name, value]) =>
    `    ${name}=${name === "stream" ? "True" : JSON.stringify(value)},\n`).join("");
  const [create, part] = given.messages ? ["chat.completions", "chunk.choices[0].delta.content or \"\""]
    : ["completions", "chunk.choices[0].text"];
  return (token ? "import os\n\n" : "") + "from openai import OpenAI\n\n"
    + `client = OpenAI(base_url=${JSON.stringify(new URL("v1", location.href).href)}, `
    + `api_key=${token ? "os.environ[\"TOKEN\"]" : "\"none\""})\n`
    + `stream = client.${create}.create(\n${written})\n`
    + `for chunk in stream:\n    print(${part}, end="", flush=True)\n`;
}

byId("say").addEventListener("submit", (event) => {
  event.preventDefault();
  speak();
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("say").requestSubmit();
});
byId("stop").addEventListener("click", () => stopping?.abort());
byId("new").addEventListener("click", () => {
  begin();
  byId("message").focus();
});
