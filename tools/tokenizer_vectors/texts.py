"""Texts that the pre-tokenizers split differently."""

TEXTS = [
    "The quick brown fox, 12 345 dogs.\n\n  It's 7 o'clock;\tdon't we've I'LL HE'S you'D y'all\r\n",
    "x = [1, 2,  3]\n    if x:\n\n\n        return 42 #naïve Straße ÉCOLE\n",
    "camelCase HTTPServer getURLFor XMLHttpRequest2 iPhone aB Ab ABc\n",
    "1 22 333 4444 55555 666666 7777777 12345678901 3.14159 1,000,000 0x1F 2024-11-24\n",
    "   leading, trailing   \n \n\t\n \t x\r\n\r\n  \r y     z\n      ",
    "(a){b}[c]<d>\"e\"'f'`g`~h!@#$%^&*_+-=|\\:;,./? ... --- ==> //// \n/*c*/ a/b/c\n",
    "日本語のテキスト、中文文本。한국어 텍스트 ㄱㄴ ㄅㄆ １２３ ４５ａｂｃ！\n",
    "нещо на Български, Ελληνικά ΑΒΓ ωμέγα, العربية ١٢٣ عربي، עברית\n",
    "हिन्दी में पाठ বাংলা ไทยภาษา ខ្មែរ မြန်မာ ລາວ\n",
    "e\u0301te\u0301 re\u0301sume\u0301 n\u0303 a\u030a\u0302 été\n",
    "🚀 ok 😶‍🌫️ ✅ ½ ² Ⅷ ① ℃ € £5 §3\n",
    "don’t “quoted” – em—dash… «g» ¿qué? ¡sí!\n\n/\n\n path/\n//\n",
    "a 漢字b漢字 カタカナab12漢34字 K2漢X 東京Tokyo'S\n",
    "Türkçe İstanbul'un ığdır'ı'nın 'd'D'll'LL\n",
    "<sentinel:12> IMGIMGABCZ tab\there  two    four\n",
    "\u00a0nbsp\u2003em\u3000ideo \u200bzero\n",
]
CODE, CAMEL_CASE, CJK, MARKS, COMBINED, SPACES = 1, 2, 6, 8, 9, 15

DIFFERENT = [
    ("tekken gpt-4o llama4 kanana2 talkie minimax-m2 kimi-k2", (MARKS, COMBINED)),
    ("kimi-k2 youtu tiny_aya cohere2moe", (CAMEL_CASE,)),
    ("tiny_aya cohere2moe afmoe", (CODE,)),
    ("deepseek-llm deepseek-coder", (SPACES,)),
    ("wordpiece", (CJK, MARKS)),
]
"""Pre-tokenizers or vocabularies, and texts that llama.cpp splits otherwise than the models' own tokenizers, which we
follow. Its matcher lacks categories such as \\p{Lu} or \\p{M}, so that it replaces or approximates their patterns;
digits that it groups by three, it joins with the text before them; it takes no space for a character of a range; and it
keeps only the first part of a Hangul syllable, and removes marks that are no accents."""
