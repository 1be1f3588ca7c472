"""Fifty prompts in Latin, Cyrillic, Han with kana, and Arabic script, with emoji among them."""

from __future__ import annotations

LATIN = (
    "What is the capital of France?",
    "Répète exactement : déjà vu, œuvre, cœur, naïve.",
    "Grüße aus Köln! Wie heißt der größte Fluss?",
    "¿Dónde está el niño? ¡Mañana será otro día!",
    "Zażółć gęślą jaźń.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Tiếng Việt có nhiều dấu: ă, â, đ, ê, ô, ơ, ư.",
    "İstanbul'da ışık ve ğ harfi",
    "List ten fruits, one on each line.",
    "def f(x):\n\treturn x  # tabs and\r\nnewlines",
    "  leading and trailing spaces  ",
    "<|im_end|> is not a control token here",
    'Complete: {"json": [1, 2, null], "and": "',
    "2+2=4, 3+3=6, 4+4=",
)
CYRILLIC = (
    "Повтори: Привет, мир!",
    "Какая столица Франции?",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Жълтата дюля беше щастлива, че пухът замръзна като гьон.",
    "Чуєш їх, доцю, га? Кумедна ж ти, прощайся без ґольфів!",
    "Расскажи о реке Волга.",
    "Српски језик: љубав, њива, ђак, џеп.",
    "Один, два, три, четыре,",
    "Москва — столица",
    "Напиши слово «кошка» пять раз.",
    "Сколько будет 7 × 8?",
    "Ёлка, ёж, ещё, всё.",
)
HAN = (
    "请重复：你好，世界。今天天气很好。",
    "法国的首都是哪里？",
    "こんにちは、元気ですか。東京は大きいです。",
    "いろはにほへと ちりぬるを",
    "カタカナ：コンピューター、インターネット",
    "床前明月光，疑是地上霜。",
    "一、二、三、四、",
    "請用繁體中文回答：臺灣的首都？",
    "龍龜鬱讓𠮷野家𩸽",
    "日本の首都は",
    "中国的长江有多长？",
    "数える：いち、に、さん、",
)
ARABIC = (
    "كرر: مرحبا بالعالم، كيف حالك اليوم؟",
    "ما هي عاصمة فرنسا؟",
    "واحد، اثنان، ثلاثة،",
    "بِسْمِ ٱللَّهِ ٱلرَّحْمَٰنِ",
    "پایتخت ایران کجاست؟",
    "اردو میں سلام لکھیں۔",
)
EMOJI = (
    "Repeat: 👩‍👩‍👧‍👦🏳️‍🌈🇫🇷 and then more emoji: 😀😃😄😁",
    "🌍🌎🌏🌍🌎🌏🌍🌎",
    "Say 👍🏽👍🏿👍🏻 and ❤️‍🔥",
    "1️⃣ 2️⃣ 3️⃣ 4️⃣",
    "Translate to emoji: I love pizza and cats 🍕🐱",
    "😀😀😀😀😀😀😀😀",
)
PROMPTS = (*LATIN, *CYRILLIC, *HAN, *ARABIC, *EMOJI)
FEW = (LATIN[1], LATIN[6], CYRILLIC[0], CYRILLIC[3], HAN[0], HAN[8], ARABIC[0], *EMOJI[:3])
