import assert from "node:assert/strict";
import { test } from "node:test";

import { Chats, nameOf } from "../page/chat/chats.js";

/** A browser's storage with room for so many characters. */
class Memory {
  items = new Map();
  constructor(room = Infinity) {
    this.room = room;
  }
  getItem(name) {
    return this.items.get(name) ?? null;
  }
  setItem(name, text) {
    const others = [...this.items].filter(([key]) => key !== name);
    if (others.reduce((sum, [key, one]) => sum + key.length + one.length, name.length + text.length) > this.room) {
      throw new Error("QuotaExceededError");
    }
    this.items.set(name, text);
  }
  removeItem(name) {
    this.items.delete(name);
  }
}

const asked = (text) => [{ role: "user", text }];
const names = (chats) => chats.list().map(({ name }) => name);

test("a chat is in the list from its first message on, the newest first", () => {
  const chats = new Chats(new Memory());
  chats.save(chats.current, []);
  assert.deepEqual(names(chats), []);
  chats.save(chats.current, asked("one"));
  const { current } = chats;
  chats.create();
  assert.notEqual(chats.current, current);
  assert.deepEqual(chats.messages(), []);
  chats.save(chats.current, asked("two"));
  assert.deepEqual(names(chats), ["two", "one"]);
  chats.save(current, [...asked("one"), { role: "assistant", text: "1" }]);
  assert.deepEqual(names(chats), ["one", "two"]);
});

test("the shown chat is that of before a reload, and another tab's chats are not lost", () => {
  const memory = new Memory();
  const chats = new Chats(memory);
  chats.save(chats.current, asked("one"));
  const other = new Chats(memory);
  assert.equal(other.current, chats.current);
  other.create();
  other.save(other.current, asked("theirs"));
  chats.create();
  chats.save(chats.current, asked("ours"));
  assert.deepEqual(names(chats), ["ours", "theirs", "one"]);
});

test("the conversation of an older page becomes a chat", () => {
  const memory = new Memory();
  memory.setItem("pipeline.conversation", JSON.stringify(asked("old")));
  const chats = new Chats(memory);
  assert.deepEqual(chats.messages(), asked("old"));
  assert.deepEqual(names(chats), ["old"]);
  assert.deepEqual(names(new Chats(memory)), ["old"]);
});

test("a name of the user's stays; an empty one is that of the first message again", () => {
  const chats = new Chats(new Memory());
  const { current } = chats;
  chats.save(current, asked("one"));
  chats.rename(current, "  my \n chat ");
  chats.save(current, asked("two"));
  assert.deepEqual(names(chats), ["my chat"]);
  chats.rename(current, " ");
  assert.deepEqual(names(chats), ["two"]);
});

test("a deleted chat is gone, also for a reply that ends later, and can be brought back to its place", () => {
  const memory = new Memory();
  const chats = new Chats(memory);
  for (const text of ["one", "two", "three"]) {
    chats.create();
    chats.save(chats.current, asked(text));
  }
  const [, { id }] = chats.list();
  chats.open(id);
  const bringBack = chats.remove(id);
  assert.notEqual(chats.current, id);
  assert.deepEqual(chats.messages(), []);
  chats.save(id, asked("late"));
  assert.deepEqual(names(chats), ["three", "one"]);
  assert.equal(memory.getItem(`pipeline.chat.${id}`), null);
  bringBack();
  assert.equal(chats.current, id);
  assert.deepEqual(chats.messages(), asked("two"));
  assert.deepEqual(names(chats), ["three", "two", "one"]);
});

test("a full storage loses tokens of other chats first, and then says so", () => {
  const chats = new Chats(new Memory(2200));
  const tokens = Array.from({ length: 20 }, () => ({ token: "x", logprob: -1, top: [] }));
  chats.save(chats.current, [{ role: "assistant", text: "a", tokens }]);
  const first = chats.current;
  chats.create();
  assert.equal(chats.save(chats.current, asked("b".repeat(1500))), true);
  assert.equal(chats.save(chats.current, asked("b".repeat(3000))), false);
  assert.deepEqual(chats.messages(), asked("b".repeat(1500)));
  chats.open(first);
  assert.equal(chats.messages()[0].tokens, undefined);
});

test("what is stored by others, or damaged, is no chat", () => {
  for (const text of ["{", "null", '{"a": 1}', '[null, {"id": 1}, {"id": "x"}]']) {
    const memory = new Memory();
    memory.items.set("pipeline.chats", text);
    assert.deepEqual(new Chats(memory).list(), []);
  }
});

test("a name is the beginning of the first message", () => {
  assert.equal(nameOf(asked(" a\n b ")), "a b");
  assert.equal(nameOf(asked("😀".repeat(100))), `${"😀".repeat(59)}…`);
  assert.equal(nameOf([{ role: "user", text: "", attachments: [{ kind: "image", name: "cat.png" }] }]), "cat.png");
  assert.equal(nameOf([]), "New chat");
});
