#!/usr/bin/env python3
"""A small generator of short children's stories: the training data of the bundled tiny model.

    python tests/stories.py --n 3 --seed 1          print three stories
    python tests/stories.py --n 1000 --out x.txt    write a thousand to a file

Every text is our own. A story is a plot (a lost thing, a quarrel, a promise, ...) told with a cast, a season,
places and objects that stay the same from beginning to end; every sentence is a little grammar of its own:
[a|b|c] chooses one, {slot} fills in a name, a pronoun or a thing. The same seed gives the same stories.
Standard library only. MIT licence, like the rest of the repository.
"""
import argparse
import random
import re

# ---------------------------------------------------------------- the world
GIRLS = "Mia Lily Anna Rosa Nora Ella Zoe Ruby Ivy Clara Lucy Emma Maya Molly Daisy Sara June Lena".split()
BOYS = "Tom Ben Max Leo Sam Finn Jack Noah Oscar Hugo Theo Milo Luke Adam Omar Peter Otto Jonah".split()
SHE = "Hazel Poppy Clover Willow Fern Dot Tilly Bella Olive Honey Ginger Maple Pearl Penny Nell".split()
HE = "Pip Bramble Biscuit Rusty Pebble Button Moss Rowan Toby Jasper Barley Acorn Bruno Nib Walter".split()

KINDS = {  # kind: (home, hand)
    "rabbit": ("a [warm|cosy|neat] burrow", "paw"), "fox": ("a [snug|cosy|dry] den", "paw"),
    "bear": ("a [snug|warm|quiet] cave", "paw"), "mouse": ("a tiny house under a root", "paw"),
    "squirrel": ("a [round|cosy] nest in an old oak", "paw"), "hedgehog": ("a [soft|snug] nest of leaves", "paw"),
    "badger": ("a [deep|tidy|warm] den", "paw"), "otter": ("a [snug|little] den", "paw"),
    "mole": ("a [tidy|warm] tunnel", "paw"), "kitten": ("an old [red|white] barn", "paw"),
    "puppy": ("a [big|old] farm house", "paw"), "duck": ("a [soft|dry] nest of straw", "wing"),
    "sparrow": ("a [small|round] nest", "wing"), "goat": ("a [little|wooden] shed", "hoof"),
}
HUMAN_HOMES = ["a [small|little|white|yellow|stone] [house|cottage]", "a house with a [red|blue|green] door",
               "a [tall|narrow|crooked] house", "a [little] wooden house"]
SETTINGS = ["in a [small|quiet|sunny|sleepy] village by the sea", "at the edge of a [green|deep|quiet|great] forest",
            "near a [wide|slow|bright] river", "in a [green|quiet|long] valley between two hills", "on a small farm",
            "beside a [calm|blue|little] lake", "at the end of a long [lane|road]",
            "at the foot of a [tall|blue] mountain", "on the sunny side of a hill", "not far from an old mill"]
PLACES = [("in", "the meadow"), ("in", "the orchard"), ("by", "the river"), ("by", "the pond"), ("on", "the hill"),
          ("by", "the old oak tree"), ("by", "the stone bridge"), ("in", "the forest"), ("behind", "the mill"),
          ("in", "the garden"), ("by", "the well"), ("near", "the barn"), ("at", "the old gate"),
          ("by", "the stone wall")]
NATURES = {"curious": "{he} [always wanted|liked|loved] to know [how things worked|what was behind the next hill|"
                      "where the wind came from|why the moon changed its shape]",
           "cheerful": "{he} [sang|hummed a tune] [while {he} worked|on the way to the well|from morning to night]",
           "shy": "{he} [often stood behind others|spoke in a very soft voice|needed a little time] [when new faces "
                  "were near|before {he} made a friend]",
           "kind": "{he} [never forgot|always remembered] to [say good morning|ask how others felt|leave some "
                   "crumbs for the birds]",
           "clever": "{he} could [solve a riddle|fix a broken wheel|count all the stars over the roof] [very fast|"
                     "before breakfast]",
           "careful": "{he} [looked twice before every jump|folded every cloth with care|checked the door two times "
                      "at night]",
           "busy": "{he} [always had] [a new plan|something to do|a small job to finish]",
           "dreamy": "{he} could [watch the clouds|listen to the rain|look out of the window] for [hours|a whole "
                     "afternoon]",
           "stubborn": "when {he} [began|started] a thing, {he} [did not stop|never gave up] [until it was done|"
                       "easily]",
           "merry": "{he} [laughed|giggled] so [loudly|much] that [the birds looked up|everyone laughed too]",
           "gentle": "{he} [carried lost beetles|helped small snails] [back to the grass|across the path]",
           "quiet": "{he} [liked|loved] [soft sounds|calm mornings|small things] and [listened more than {he} spoke|"
                    "noticed what others missed]"}
HOBBIES = ["painting pictures", "singing old songs", "collecting round stones", "watching the clouds",
           "climbing trees", "baking little cakes", "building small towers", "telling riddles", "counting the stars",
           "drawing maps", "listening to stories", "making paper boats", "looking for feathers", "growing beans",
           "jumping over puddles"]
OBJECTS = [  # thing, adjectives, what it is for
           ("kite", "red|blue|yellow|green", "fly it in the wind"),
           ("ball", "red|blue|round|striped", "roll it down the path"),
           ("boat", "wooden|small white|little blue", "sail it on the water"),
           ("flute", "wooden|silver", "play it under the trees"),
           ("drum", "small|round|red", "play it on the doorstep"),
           ("scarf", "yellow|long blue|striped|warm red", "wear it on long walks"),
           ("hat", "green|soft|straw|red", "wear it to the market"),
           ("lantern", "brass|little|bright", "carry it along the path at night"),
           ("picture book", "old|big|beautiful", "read it under a tree"),
           ("bell", "silver|tiny|golden", "ring it at supper time"),
           ("blanket", "soft|blue|warm|yellow", "sit on it in the sun"),
           ("spinning top", "wooden|painted|red", "spin it on a flat stone"),
           ("whistle", "tin|silver|wooden", "blow it and hear the hills answer"),
           ("basket", "round|little|brown", "fill it with good things"),
           ("music box", "tiny|painted|old", "listen to its small song"),
           ("toy cart", "red|wooden|little", "pull it up and down the lane"),
           ("paint box", "new|small|wooden", "paint the sky with it"),
           ("wooden horse", "little|brown|painted", "take it on great journeys")]
FOODS = ["a [warm|sweet|round] apple pie", "a loaf of [fresh|warm|brown] bread", "a [big|round] honey cake",
         "a basket of [red|sweet] apples", "a bowl of [sweet|ripe] berries", "a plate of [warm|little] pancakes",
         "a pot of [hot|good] soup", "a bag of [ripe|sweet] plums", "a [big|round|yellow] cheese"]
ELDERS = [("Grandma", "f"), ("Grandpa", "m"), ("Mama", "f"), ("Papa", "m"), ("Aunt Rose", "f"), ("Uncle Bert", "m")]
HELPERS_A = [("the old owl", "m"), ("the wise turtle", "f"), ("the grey goose", "f"), ("the old crow", "m"),
             ("the tall heron", "m"), ("the big brown horse", "m"), ("the old toad", "m"), ("the black hen", "f")]
HELPERS_H = [("the baker", "m"), ("the miller", "m"), ("the old gardener", "f"), ("the old fisherman", "m"),
             ("the shepherd", "m"), ("the teacher", "f"), ("the old sailor", "m"), ("the woman at the market", "f")]
WEATHER = {"spring": ["the [first|little] flowers [were opening|looked out of the grass]",
                      "a soft rain had washed the leaves in the night", "the birds were singing in every tree",
                      "the air smelled of [wet earth|fresh grass|blossoms]"],
           "summer": ["the sun [was already warm|shone on every leaf]",
                      "the bees were humming [in the clover|around the flowers]",
                      "the sky was [blue and wide|as blue as a cornflower]", "a warm wind moved the tall grass"],
           "autumn": ["red and yellow leaves [were dancing|danced] in the wind",
                      "the air was [cool|clear] and smelled of [apples|smoke]", "a thin mist lay over the fields",
                      "the geese were flying over the roofs"],
           "winter": ["snow lay on the [fences|roofs and the fences] like a [white|soft] blanket",
                      "[long icicles hung from the roof|frost flowers grew on the windows]",
                      "the snow [creaked|crunched] under every step",
                      "tiny snowflakes [were falling|fell] without a sound"]}
LITTLE_ONES = [("a duckling", "duckling", "pond"), ("a lamb", "lamb", "green field"),
               ("a baby bird", "baby bird", "nest"), ("a tiny mouse", "mouse", "hole in the wall"),
               ("a lost kitten", "kitten", "barn"), ("a young hedgehog", "hedgehog", "nest of leaves"),
               ("a small turtle", "turtle", "stream"), ("a lost puppy", "puppy", "farm")]
PRONOUNS = {"f": ("she", "her", "her", "herself"), "m": ("he", "him", "his", "himself")}

# how a speaker speaks: mood -> (verb, what follows the name)
TAGS = {"": [("said", ""), ("said", ""), ("said", ""), ("answered", ""), ("said", " after a while")],
        "ans": [("answered", ""), ("replied", ""), ("said", ""), ("said", ""), ("answered", " at once")],
        "sad": [("said", " sadly"), ("whispered", ""), ("said", " in a small voice"), ("sighed", ""),
                ("said", " and looked at the ground")],
        "happy": [("said", " happily"), ("said", " with a smile"), ("laughed", ""), ("said", " and laughed"),
                  ("said", " with bright eyes")],
        "kind": [("said", " gently"), ("said", " softly"), ("said", " kindly"), ("said", ""),
                 ("said", " in a warm voice")],
        "low": [("whispered", ""), ("said", " quietly"), ("murmured", ""), ("said", " in a low voice")],
        "loud": [("called", ""), ("cried", ""), ("shouted", ""), ("called", " in a loud voice")],
        "?": [("asked", ""), ("asked", ""), ("asked", ""), ("wanted to know", "")],
        "?sad": [("asked", " sadly"), ("asked", " in a small voice"), ("whispered", "")],
        "?kind": [("asked", " gently"), ("asked", " kindly"), ("asked", ""), ("asked", " in a warm voice")],
        "?low": [("whispered", ""), ("asked", " quietly"), ("asked", " in a low voice")],
        "?loud": [("called", ""), ("cried", "")],
        "?happy": [("asked", " and laughed"), ("asked", " with a smile"), ("asked", " with bright eyes")],
        "!kind": [("said", ""), ("said", " gently"), ("said", " kindly")],
        "!low": [("whispered", ""), ("said", " in a low voice")],
        "!ans": [("said", ""), ("replied", ""), ("answered", ""), ("cried", "")],
        "!": [("cried", ""), ("called", ""), ("said", ""), ("shouted", "")],
        "!sad": [("cried", ""), ("said", " sadly"), ("sobbed", "")],
        "!happy": [("cried", ""), ("laughed", ""), ("called", " happily"), ("said", " with a big smile"),
                   ("said", " happily")]}

# reflections by theme; every ending closes with one
MORALS = {"friend": ["a [good|true] friend [is worth more than any treasure|makes every day brighter|is the best "
                     "thing to find]",
                     "[everything is|most things are] easier [with a friend|when two do it together]",
                     "[a trouble gets smaller when you share it|a long road gets short when a friend walks beside "
                     "you]"],
          "brave": ["being brave does not mean [having no fear|that you are never afraid]",
                    "[even a small heart can be very brave|you can be afraid and brave at the same time]",
                    "a fear grows small when you [look at it|walk up to it|hold a friend's {hand}]"],
          "honest": ["[the truth|a true word] makes a heavy heart light",
                     "it is better to [tell the truth|say sorry] than to hide",
                     "a mistake can be mended when you [tell the truth|say that you are sorry]"],
          "share": ["[bread|a meal] tastes better when it is shared",
                    "what you give away [comes back|finds its way home] [in the end|one day]",
                    "there is always enough when [everyone shares|friends share]"],
          "try": ["[you can learn almost anything|most things come right] if you [try again|do not give up]",
                  "every [master|good thing] [begins small|starts with a first try]",
                  "a mistake is only [a step on the way|the first half of a good idea]"],
          "kind": ["a [small|little] kindness can [change a whole day|go a long way|grow very big]",
                   "helping others [makes the heart warm|is never a waste of time]",
                   "[the best gifts|the best things] come from the heart"],
          "wait": ["good things [take time|need time to grow]",
                   "[waiting is easier|time goes faster] when you [wait together|have something to do]"],
          "home": ["[there is no place like home|home is where someone waits for you]",
                   "the best part of a [long day|journey] is coming home"]}


class Story:
    def __init__(self, rng):
        r = self.r = rng
        self.paras, self.slots, self.last, self.new = [], {}, None, set()
        self.slots["theday"] = "the day"
        world = r.random()
        self.animals = world < 0.55                       # all animals, or people (sometimes with an animal friend)
        used = set()
        for key, pre in (("A", ""), ("B", "b"), ("D", "d")):
            animal = self.animals or (key == "B" and world > 0.85)
            sex = r.choice("fm")
            while True:
                name = r.choice((SHE if sex == "f" else HE) if animal else (GIRLS if sex == "f" else BOYS))
                kind = r.choice(list(KINDS)) if animal else {"f": "girl", "m": "boy"}[sex]
                if name not in used and (not animal or kind not in used):
                    break
            used |= {name, kind}
            self.person(key, pre, name, sex)
            self.slots.update({key + "n": name, pre + "the": " the " + kind if animal else ""})
            home, hand = KINDS.get(kind, (r.choice(HUMAN_HOMES), "hand"))
            self.slots.update({pre + "kind": kind,
                               pre + "home": self.t(home),
                               pre + "hand": hand,
                               pre + "hands": {"hoof": "hooves"}.get(hand, hand + "s")})
        self.person("E", "e", *r.choice(ELDERS))
        helpers = HELPERS_A if self.animals else HELPERS_H
        self.person("C", "c", *r.choice(helpers))
        for i, (prep, place) in enumerate(r.sample(PLACES, 3)):
            n = str(i + 1) if i else ""
            self.slots.update({"at" + n: prep + " " + place, "pl" + n: place})
        thing, adjs, use = r.choice(OBJECTS)
        self.slots.update(thing=thing, adj=r.choice(adjs.split("|")), use=use, food=self.t(r.choice(FOODS)))
        self.slots["setting"] = self.t(r.choice(SETTINGS))
        self.new = {"B", "D"}                             # not introduced yet
        self.nature = r.choice(list(NATURES))
        self.slots["nature"] = self.nature
        self.slots["hobby"], self.slots["hobby2"] = r.sample(HOBBIES, 2)

    def person(self, key, pre, name, sex):
        he, him, his, self_ = PRONOUNS[sex]
        self.slots.update({key: name, pre + "he": he, pre + "him": him, pre + "his": his, pre + "self": self_})

    def season(self, *allowed):
        s = self.r.choice(allowed or ("spring", "summer", "autumn", "winter"))
        self.slots["season"] = s
        self.slots["weather"] = self.t(self.r.choice(WEATHER[s]))

    def t(self, text, quoted=False):
        """Expand one template: choices from the inside out, then slots."""
        while "[" in text:
            text = re.sub(r"\[([^\[\]]*)\]", lambda m: self.r.choice(m[1].split("|")), text)
        while "{" in text:
            text = re.sub(r"\{(\w+)\}('s)?", lambda m: self.fill(m, quoted), text)
        return text

    def fill(self, m, quoted):
        key, owner = m[1], m[2] or ""
        if key in ("Bn", "Dn"):                           # the template introduces this one
            self.new.discard(key[0])
        if key in self.new and not quoted:
            return self.intro(key, bool(owner)) + owner
        return self.slots[key] + owner

    def intro(self, key, owner=False):
        """The first mention of a friend (B) or a third one (D) in the narration says who it is."""
        self.new.discard(key)
        pre, name, his = key.lower(), self.slots[key], self.slots["his"]
        if self.slots[pre + "kind"] in ("girl", "boy"):
            if key == "D":
                return self.r.choice(["little ", "tall ", "", ""]) + name
            return his + self.r.choice([" friend ", " friend ", " good friend ", " neighbour ", " cousin "]) + name
        the = name + " the " + self.slots[pre + "kind"]
        if owner:
            return his + " friend " + name if key == "B" else name
        return self.r.choice([the, his + " friend " + the]) if key == "B" else the

    def speech(self, who, mood, text):
        r, text = self.r, self.t(text, True)
        parts = re.split(r"(?<=[.!?]) ", text, maxsplit=1)
        # a question or a shout has its own verbs; a mood colours them
        end = parts[0][-1] if len(parts) > 1 else text[-1]
        key = mood if end == "." else end + mood
        verb, tail = r.choice(TAGS.get(key) or TAGS[end])
        name = self.intro(who) if who in self.new else self.slots[who]
        pre = {"A": ""}.get(who, who.lower())
        if self.last == who and r.random() < 0.6:         # the reader knows who it is
            left = right = self.slots[pre + "he"] + " " + verb
        else:
            left, right = name + " " + verb, (name + " " + verb if " " in verb else verb + " " + name)
        if verb in ("said", "asked", "called", "whispered") and end != "!" and " and " not in tail and r.random() < 0.2:
            return '%s%s, "%s"' % (left, tail, text)
        first = parts[0][:-1] + "," if end == "." else parts[0]
        if len(parts) > 1 and r.random() < 0.75:
            return '"%s" %s%s. "%s"' % (first, right, tail, parts[1])
        if len(parts) > 1:                                # the tag at the end takes the last sentence's mark
            end = text[-1]
            verb, tail = r.choice(TAGS.get(mood if end == "." else end + mood) or TAGS[end])
            text = text[:-1] + "," if end == "." else text
            return '"%s" %s%s.' % (text, name + " " + verb if " " in verb else verb + " " + name, tail)
        return '"%s" %s%s.' % (first, right, tail)

    def item(self, x):
        """str: a sentence (a leading ? makes it optional); list: one of these; tuple: speech; Seq: all of these."""
        if isinstance(x, list):
            return self.item(self.r.choice(x))
        if isinstance(x, Seq):
            return " ".join(filter(None, (self.item(y) for y in x.items)))
        if isinstance(x, tuple):
            out = self.speech(*x)
            out = out[:1].upper() + out[1:]
            self.last = x[0]
            return out
        if x.startswith("?"):
            if self.r.random() < 0.45:
                return ""
            x = x[1:]
        out = self.t(x)
        out = out[:1].upper() + out[1:]
        named = [k for k in "ABCDE" if re.search(r"\b%s\b" % self.slots[k], out, re.I)]
        self.last = named[0] if len(named) == 1 else None
        return out

    def p(self, *items):
        self.last = None
        text = " ".join(filter(None, (self.item(x) for x in items)))
        text = re.sub(r"  +", " ", text).replace(" ,", ",").replace(" .", ".")
        text = re.sub(r"\b([Aa]) (?=[aeiouAEIOU])(?!one\b|useful\b)", r"\1n ", text)
        text = re.sub(r'(^"?|[.!?] "?|\." "?)([a-z])', lambda m: m[1] + m[2].upper(), text)
        if text:
            self.paras.append(text)

    # ------------------------------------------------------------ shared parts
    def opening(self):
        r, s = self.r, self.slots
        little = r.choice(["little ", "young ", "small ", ""])
        s["who"] = r.choice(["a " + little + "{kind}",
                             "a {nature} " + r.choice(["little ", "young ", "little "]) + "{kind}",
                             "a {nature} {kind}"])
        named = "[named|called]"
        if r.random() < 0.62:
            first = r.choice(["Once upon a time, {setting}, there lived {who} " + named + " {A}.",
                              "Once upon a time there was {who} " + named + " {A}, who lived in {home} {setting}.",
                              "Once upon a time, {who} " + named + " {A} lived in {home} {setting}.",
                              "Once upon a time there lived {who} " + named + " {A}.",
                              "Once upon a time, in {home} {setting}, lived {who} " + named + " {A}.",
                              "Once upon a time there was {who}. [{his} name was {A}|everyone called {him} {A}], "
                              "and {he} lived {setting}."])
        else:
            first = r.choice([
                "There was once {who} " + named + " {A}, who lived {setting}.",
                "Long ago, {setting}, there lived {who} " + named + " {A}.",
                "Far away, [beyond the hills|behind the blue mountains], {who} " + named + " {A} lived in {home}.",
                "{A} was {who} who lived in {home} {setting}.",
                "In {home} {setting} lived {who} " + named + " {A}.",
                "[This is the story of|Let me tell you about] {A}, {who} who lived {setting}.",
                "Not so long ago, {who} " + named + " {A} lived in {home} {setting}."])
        return Seq(first, self.nature_line(),
                   ["?{he} [liked|loved] {hobby}, and {he} [liked|loved] {hobby2} even more.",
                    "?most of all, {A} [liked|loved] {hobby}.",
                    "?{his} days were full of [small|happy] things, [like|such as] {hobby} and {hobby2}.",
                    "?by the door stood [a green bench|an old bench|a blue barrel], and [a cat often slept there|"
                    "{A} often sat there in the evening]."
                    if "{home}" in first else
                    ""])

    def nature_line(self):
        said = "{nature}" in self.slots["who"]            # do not say it twice
        line = NATURES[self.nature]
        if said:
            return line + "."
        return self.r.choice(["{A} was [very|always] {nature}, and " + line + ".",
                              line + "[, for {he} was very {nature}|]."])

    def day(self, part="[morning|morning|afternoon]"):
        """The sentence start that sets the scene: "One spring morning, "."""
        detail = self.r.choice(["a [robin|blackbird|small bird] [sang|sat] on the [fence|roof|gate]",
                                "a cloud like a [ship|sheep|feather] sailed over the [hill|roofs]",
                                "smoke rose from the chimneys", "far away, a dog barked",
                                "the brook [sang|murmured] under the bridge", "the church bell rang"])
        return self.r.choice(["One {season} " + part + ", ", "One [fine|clear|quiet] {season} " + part + ", ",
                              "It was a {season} " + part + ", and {weather}. ", "One " + part + " in {season}, ",
                              "It was a [fine|quiet|cool|clear] " + part + " in {season}. " + detail[0].upper() +
                              detail[1:] + " [when|as|just when] ",
                              "One {season} " + part + ", when {weather}, "])

    def friend(self):
        if self.slots["bkind"] in ("girl", "boy"):
            return self.r.choice(["{Bn} from next door", "{his} friend {Bn}", "{his} cousin {Bn}",
                                  "{Bn}, the {bkind} from next door,"])
        return self.r.choice(["{his} friend {Bn}, the {bkind},", "{Bn}, the {bkind},",
                              "{his} best friend, {Bn} the {bkind},"])

    def meet(self):
        return ["{B} [came|walked|hurried] [along the path|down the lane|around the corner] and [stopped|saw {A}'s "
                "sad face].",
                "Just then, " + self.friend() + " [came by|came along the path|looked over the fence].",
                "Then " + self.friend() + " [came to visit|came by|appeared at the gate]."]

    def troubled(self):
        return Seq([("B", "kind", "[What is the matter|What is wrong|Why do you look so sad|What happened], {A}?"),
                    ("B", "kind", "You [look sad|look worried] today. [What is wrong|Can I help|What happened]?"),
                    ("B", "kind", "{A}, [are you all right|why are you so quiet|what has happened]?")])

    def cheer(self):
        return [("B", "kind",
                 "[Do not worry|Do not cry|Don't be sad]. [We will find a way|I will help you|Two heads are better "
                 "than one|We can do it together|There is always a way]."),
                ("B", "happy",
                 "[I have an idea|I know what we can do|Let us think]! [Come with me|We will do it together|Come, I "
                 "will help you]."),
                Seq("{B} [took|held] {A}'s {hand} [for a moment|gently|kindly].",
                    ("B", "", "[We will try together|I will stay with you|You are not alone]."))]

    def thanks(self, a="A", b="B"):
        n = "{%s}" % b
        return [(a, "happy",
                 "Thank you, " + n +
                 ". [You are a true friend|I will never forget this|You are very kind|I am so glad that you were "
                 "here]."),
                (a, "happy",
                 "[Oh, thank you|Thank you so much]! [What would I do without you|How can I ever thank you]?"),
                "{%s} [hugged|thanked] %s [with all {%s} heart|again and again|with a happy smile]."
                % (a, n, "his" if a == "A" else a.lower() + "his")]

    def ending(self, *themes):
        r = self.r
        moral = r.choice(MORALS[r.choice(themes)])
        when = r.choice(["That [evening|night], ", "When the [stars came out|moon rose], ",
                         "When the sun went down, ", "Later, [at bedtime|after supper], "])
        heard = self.slots["E"] in " ".join(self.paras[-2:])      # then there is nothing left to tell
        self.p([when + "{A} [lay in bed|sat by the window|lay under a warm blanket] and thought about {theday}.",
                when + "{A} [looked up at the sky|sat on the doorstep] and [smiled|was quiet for a while]."
                if heard else
                when + "{A} told {E} [the whole story|everything that had happened|all about it].",
                when + "{A} was [tired|very tired], but [happy|very happy]."],
               ["{he} [knew now|understood now|had learned] that " + moral + ".",
                ("A", "low", "[I think|Now I know that|I have learned that] " + moral + "."),
                "[And {he} thought|{he} thought to {self}] that " + moral + ".",
                Seq(("A", "?", "[Do you know what I learned today, {E}|Shall I tell you something, {E}]?"),
                    "{E} [nodded|smiled|bent down to listen].", ("A", "ans", moral[0].upper() + moral[1:] + "."))
                if not heard else
                "{he} [knew now|had learned] that " + moral + "."],
               ["?Then {he} [closed {his} eyes and fell asleep|smiled and fell asleep|slept well until the morning].",
                "?And from that day on, {A} [never forgot it|remembered it|was a little wiser].",
                "?Outside, the [moon shone on the quiet {season} night|night was calm and full of stars].",
                "?And {A} [smiled|was happy|felt warm inside].",
                "?It had been a [good|long and lovely|very good] day."])


class Seq:
    def __init__(self, *items):
        self.items = items


# ---------------------------------------------------------------- the plots
def lost(s):
    s.season()
    s.p(s.opening(),
        ["{he} had [a treasure|one special thing]: a {adj} {thing}. {he} loved to {use}.",
         "{A} [had|owned] a {adj} {thing}, and {he} loved to {use}.",
         "{his} [favourite thing|greatest treasure] was a {adj} {thing}. [{E} had made it for {him}|It was a gift "
         "from {E}].",
         "{E} had [given|made] {him} a {adj} {thing}, and {A} [loved|liked] to {use}."])
    s.p(s.day("morning") + "{A} took the {thing} out to play {at}.",
        ["But at noon, when {he} [wanted to go home|sat down to rest|looked around], the {thing} was gone.",
         "But after a while {he} [looked down|looked around], and the {thing} was [gone|not there]."],
        [("A", "sad", "Oh no! [Where is my {thing}|Where can it be]?"),
         ("A", "sad", "My {thing} is gone! [I had it this morning|I had it a moment ago]."),
         "{his} heart [sank|felt heavy], and {his} eyes filled with tears."],
        "?{A} looked behind every bush, but there was [nothing|only a wet feather|only an old shoe].")
    s.p(s.meet(), s.troubled(),
        ("A", "sad",
         "I [have lost|cannot find] my {adj} {thing}. [I have looked everywhere|I do not know where it is]."),
        s.cheer(),
        ["They looked {at} and {at3}. [They looked under every stone|They turned over every leaf].",
         "Together they [searched|looked] {at3}, but [it was not there|they found only a few old nuts].",
         "They walked back, step by step, and looked {at} and {at3}."],
        [Seq("[At last|On the way] they [met|asked] {C}.",
             ("C", "kind", "[Think back|Think slowly]. Where did you [stop|rest] [today|on your way]?"),
             ("A", "ans", "I stopped {at2} to [look at a bird|drink some water|tie up my bag]."),
             "They ran back as fast as they could."),
         ""])
    s.p(["And there it was! The {thing} [lay under a bush|was behind a big stone|hung on a low branch], safe and "
         "[sound|dry].",
         "There, [under a bush|between two roots|beside the fence], they saw something. It was the {adj} {thing}!",
         "A [small bird|little beetle] sat on something behind a bush, and it was the {thing}!"],
        ["{A} [laughed|jumped] for joy.",
         ("A", "happy",
          "[There it is|We found it|Here it is]! [I must have dropped it when I ran|I thought I would never see it "
          "again].")],
        s.thanks(),
        ["The two friends [played|stayed] together until [supper|the sun was low].",
         "{A} let {B} [hold the {thing} all the way home|carry the {thing} home]."])
    s.ending("friend", "home", "kind")


def quarrel(s):
    s.season()
    s.p(s.opening(),
        ["{his} best friend was {Bn}{bthe}, and [the two|they] [played together every day|did everything together].",
         "{A} and {Bn}{bthe} were [best friends|good friends], and [they played together every day|everyone knew "
         "it]."])
    s.p(s.day() + "the two friends [found|saw] a {adj} {thing} {at}.",
        [Seq(("A", "!", "[I saw it first|It is mine]!"),
             ("B", "!", "[No, it is mine|No, I saw it first]! [I want to {use}|Give it to me]!")),
         Seq(("B", "happy", "[Look, how beautiful|Look at that]! I want to {use}."),
             ("A", "!", "[No, I want it|No, I was here first]!"))],
        ["They both pulled, and [the {thing} fell into the mud|the {thing} fell to the ground].",
         "They [pulled|shouted] until they were red and tired.",
         "Soon they were [both angry|shouting], and [the birds flew away|nobody was happy]."],
        ["{B} [turned around|stamped one foot] and went home without [a word|saying goodbye].",
         "Then {B} ran home, and {A} stayed alone with the {thing}.",
         "{A} took the {thing} and [marched|walked] home, and {B} went the other way."])
    s.p(["At home, {A} [looked at|sat down beside] the {thing}, but it was no fun [at all|alone].",
         "But the {thing} was [not much fun|dull] without a friend.",
         "{A} tried to play alone, but [something was missing|the hours were very long]."],
        [Seq(("E", "kind", "[Why are you so quiet|What is wrong|Where is {B} today]?"),
             ("A", "sad", "We [had a quarrel|shouted at each other]. [I was not kind|I said bad things]."),
             ("E", "kind",
              "[Then you know what to do|A quarrel is like a knot. It can be untied|A kind word opens every door].")),
         "?{he} thought of {B}'s sad face, and {his} heart felt heavy.",
         Seq("{A} thought [for a long time|about it].",
             ("A", "low", "[I miss {B}|It was my fault too|A {thing} cannot laugh with me]."))],
        ["So {A} [took the {thing}|put the {thing} under one arm] and went to find {B}.",
         "Then {he} [jumped up|stood up] and ran to {B}'s home with the {thing}."])
    s.p(["{B} was sitting {at2}, all alone.", "{B} opened the door [slowly|just a little].",
         "Halfway there, {A} met {B}, who was coming to see {him}."],
        ("A", "sad",
         "[I am sorry|I am so sorry], {B}. [I was selfish|I should not have shouted|You are more important than a "
         "{thing}]."),
        ("B", "ans", "I am sorry too. [I missed you|I was angry and unkind|It was no fun without you]."),
        ["They [hugged|laughed], and the quarrel was [over|forgotten].", "Then they both began to smile."],
        ["From then on, they [took turns|shared the {thing}]: one day it was {A}'s turn, and the next day it was "
         "{B}'s.",
         "They [took turns|shared the {thing}] all afternoon, and [it was twice as much fun|nobody wanted to go "
         "home]."])
    s.ending("friend", "share", "honest")


def fear(s):
    s.season("spring", "summer", "autumn")
    what, why, where = s.r.choice([
        ("the dark", "the dark was full of strange sounds", "in the dark forest"),
        ("the old bridge", "the old bridge shook with every step", "on the other side of the old bridge"),
        ("deep water", "nobody could see what was down there", "on a stone in the middle of the river"),
        ("high places", "the ground looked so far away", "on top of the high rock"),
        ("the black cave", "something in the black cave always went drip and drop", "in the black cave")])
    s.slots.update(what=what, why=why, where=where)
    s.p(s.opening(),
        ["But there was one thing that made {him} [shake|tremble]: {what}.",
         "Only one thing frightened {A}, and that was {what}.",
         "But {A} was afraid of {what}. {he} [thought|said] that {why}."],
        ["?The others sometimes laughed about it, but {B} never did.",
         "?{he} [told nobody|never told anyone], only {B}.",
         "?When the others played there, {A} always [stayed at home|had something else to do]."])
    s.p("One {season} evening, [{B} did not come home|{B} was late for supper|nobody could find {B}]. {weather}, "
        "but [nobody looked at that|{A} did not notice it].",
        [Seq(("E", "?", "[Has anyone seen {B}|Where is {B}|Do you know where {B} is]?"), "Nobody knew."),
         "Everyone [called|called and called], but there was no answer."],
        ["Then {A} heard a [faint|thin|small] voice far away.",
         "{A} listened. Somewhere, someone was [calling|crying]."],
        ("B", "loud", "Help! [I am here!|Is anybody there?|Can you hear me?]"),
        "{A} [understood at once|knew what had happened]: {B} was {where}.")
    s.p(["{A}'s [knees|legs] shook, and {his} mouth was dry.",
         "{A} wanted to run away, and {his} heart beat like a drum."],
        [("A", "low", "[I am afraid|I am so scared]. But {B} [needs me|is my friend]."),
         ("A", "low", "[One step|First one step], and then [one more|another one]. [I can do that|That is all]."),
         "But {he} thought of {B}, all alone, and took a deep breath."],
        ["So {A} [took a lantern|took a long rope|found a strong stick] and went, one step after the other.",
         "{he} sang a small song, and with every line {he} took a step.",
         "{he} counted to three and [started|went on]."],
        ["?It was not as bad as {he} had thought.", "?After ten steps, {his} legs stopped shaking.",
         "?Slowly, the fear grew smaller."],
        ["At last {A} [reached|saw] {B}.", "And then {A} was there."],
        Seq(("B", "happy", "[You came|It is really you]! But [you are afraid of {what}|you never come here]!"),
            ("A", "ans",
             "I [was|still am] a little afraid. But [I wanted to help you|I could not leave you alone|you are my "
             "friend].")),
        ["{he} held out one {hand}, and together they [went|walked] slowly back.",
         "{A} showed {B} the way, and step by step they came home."])
    s.p(["At home, {E} [put a warm blanket around them|gave them hot soup] and [listened to the story|was very proud].",
         "Everyone [cheered|was glad], and {E} gave them [hot soup|warm milk with honey]."], s.thanks("B", "A"))
    s.ending("brave", "brave", "friend")


def sharing(s):
    s.season("summer", "autumn", "spring")
    s.p(s.opening(), s.day("morning") + "{E} gave {him} {food} for the [road|day].",
        ("E", "kind", "[This is for you|It is all for you]. [Eat it when you are hungry|Take good care of it]."))
    both = [("an old [horse|donkey]", "m"), ("a thin [cat|dog]", "f")]
    bird = ("a little bird with a hurt wing", "f")
    animals = both + [bird, ("a snail with a small bag", "m"), ("a hungry hen", "f")]
    people = both + [("a traveller with dusty shoes", "m"), bird, ("an old woman with a heavy bag", "f"),
                     ("a small boy without shoes", "m")]
    who = s.r.sample(animals if s.animals else people, 1)[0]
    first = s.t(who[0])
    noun = re.sub(r"^an? ", "the ", first).split(" with")[0]
    s.person("C", "c", noun, who[1])
    s.slots["stranger"] = first
    s.p(["{A} walked [through the fields|along the lane|up the hill] and [thought only of {his} lunch|smelled the "
         "good smell].",
         "The food smelled so good that {A} could [hardly|not] wait for noon."],
        ["{at}, {he} met {stranger}.", "When {he} came to {pl}, {he} saw {stranger}."],
        ("C", "sad",
         "[Good day|Hello|Hello there]. I [have eaten nothing since yesterday|am so hungry|have come a long way, "
         "and I have nothing to eat]."),
        ["{A} looked at the food. {he} was hungry too.",
         "{A} [held the food tight|did not answer at first]. There was just enough for one.",
         "At first {A} wanted to [hide the food|walk on]."],
        [("A", "low",
          "[If I share it, I will have only half|There is not very much]. But [half is enough|nobody should be "
          "hungry]."),
         "But then {he} saw how [tired|weak|hungry] {C} looked.", "Then {he} remembered how it feels to be hungry."],
        "{A} [smiled|sat down|opened the bag|nodded].",
        ("A", "kind",
         "[Please, sit down with me|Come, sit beside me]. [We can share|There is enough for two|I will give you "
         "half]."))
    s.p(["They [sat in the grass|sat down under a tree] and ate together, and {C} told [a funny story|about far "
         "lands|many old tales].",
         "They ate [every crumb|it all], and {C} [looked much better|began to smile]."],
        ("C", "happy", "[Thank you|You have a good heart]. [One day I will help you too|I will not forget it]."),
        ["On the way home, [dark clouds came|a thick mist came down], and {A} [lost the way|could not see the path].",
         "Later, {A} [slipped|fell] and could not [walk|get up], for one foot hurt."],
        ["{he} [called|called for help], and [who came|who came along]? It was {C}!",
         "Then {he} heard steps. It was {C}!"],
        ("C", "kind",
         "[You helped me|You shared with me], and now I will help you. [Come|Hold on to me], I [know the way|will "
         "take you home]."),
        ["{C} [brought|led] {him} safely [home|to the door].",
         "Together they came home [before dark|in time for supper]."],
        ["?{E} asked {C} to stay for supper, and there was [plenty|enough] for everyone.",
         "?{E} was [waiting at the door|very glad] and asked them both to come in."])
    s.ending("share", "kind")


def little_one(s):
    s.season("spring", "summer", "autumn")
    a, noun, home = s.r.choice([x for x in LITTLE_ONES if x[1] != s.slots["kind"] and x[1] != s.slots["bkind"]])
    s.slots.update(baby=a, nest=home)
    s.person("D", "d", "the " + noun, s.r.choice("fm"))
    s.new.discard("D")
    s.p(s.opening())
    s.p(s.day() + "{A} was {at} when {he} heard [a thin cry|a small sound|someone crying].",
        ["Behind a [bush|stone] sat {baby}, all alone.", "There, under a big leaf, was {baby}.",
         "{he} looked around and found {baby} in the grass."],
        ("A", "kind",
         "[Hello, little one.|Why are you crying?|Who are you?] [Where is your mother|Are you lost|Can I help you]?"),
        ("D", "sad",
         "I [followed a butterfly|ran after a leaf|only wanted to see the world], and now I [cannot find my home|"
         "have lost my way|do not know where I am]."),
        [("A", "kind",
          "[Do not cry|Do not be afraid]. [We will find your mother|I will take you home|I will help you]."),
         "{A} [sat down|knelt down] beside {D} and [dried the tears|waited until the tears stopped]."])
    s.p([Seq("First they asked {B}.", ("A", "?", "[Do you know where {D} lives|Have you seen the mother of {D}]?"),
             ("B", "ans",
              "[No, I am sorry|I do not know]. But [I heard someone calling|I saw someone searching] {at2}."),
             "?{B} came along, for three can see more than two."),
         Seq("They asked everyone [they met|on the way].",
             ("B", "ans",
              "[Try to look|You should look] {at2}. [I heard a worried voice there|Someone was calling there this "
              "morning]."))],
        ("A", "kind", "[What does your home look like|What do you remember about your home|What is near your home]?"),
        ("D", "ans",
         "[There is|I remember] a {nest}[, and it smells of mint|, and there is a big willow tree|, and you can "
         "hear the water|, and my mother sings there]."),
        ["They looked {at2} first, but nobody was there.", "They walked [on and on|a long way], past {pl2}."],
        ["{D} was tired, so {A} [told {dhim} a story|sang {dhim} a song|carried {dhim} a little way].",
         "?The way was long, but {A} [knew many songs|told many riddles]."])
    s.p(["[Suddenly|Then] they heard a voice. It was [near|close to] {pl3}.",
         "When they came to {pl3}, {D} [jumped|lifted {dhis} head]."],
        ("D", "happy", "[That is my mother|Mother, here I am|I can hear my mother]!"),
        ["The mother came running and [held {D} close|covered {D} with kisses].",
         "Mother and child held each other, and [both cried a little|both laughed]."],
        ['"[How can I thank you, {A}?|You brought my child home!]" said the mother. "[You are always welcome here|'
         'You will always have friends here]."',
         'The mother turned to {A}. "[Thank you|You have a good heart]," she said. "[Come and visit us whenever you '
         'like|Please stay and eat with us]."'],
        ["{A} [waved|said goodbye] and went home with a [warm|light] heart.",
         "They [all ate together|had a little feast], and {A} [felt very proud|was as happy as {D}]."])
    s.ending("kind", "home")


def plan(s):
    s.season()
    cake, spoil, fix = s.r.choice([("a big birthday cake", "the cake [came out black|was as flat as a plate]",
                                    "put [berries|honey and nuts] on top and [cut it into stars|called it a star "
                                    "cake]"),
                                   ("a birthday song", "the song [came out all wrong|sounded like a wet cat]",
                                    "[sang it slowly, line by line|clapped while the others sang]"),
                                   ("a [long|bright] chain of paper flowers",
                                    "the wind [tore the chain apart|blew the paper into the mud]",
                                    "made [little paper stars|small crowns] out of the pieces"),
                                   ("a [warm|soft] winter scarf",
                                    "the scarf [came out much too long|had more holes than wool]",
                                    "[cut it in two and made two scarves|turned it into a warm blanket]"),
                                   ("a big painting", "a pot of blue paint [fell over|ran] across the whole picture",
                                    "turned the blue spot into [the sea|a great blue whale]")])
    s.slots.update(gift=s.t(cake), spoil=s.t(spoil), fix=s.t(fix))
    s.p(s.opening(), s.day("morning") + "{A} woke up [early|before everyone else]. Tomorrow was {E}'s birthday!",
        [("A", "happy", "I will make {gift}. [It will be a surprise|Nobody must know]."),
         "{he} wanted to make {gift}, and it had to be a surprise."])
    s.p(["{A} told only {B}.", "{he} [asked|called] {B} to help."],
        ("B", "?", "[Do you know how to do it|Have you ever done that before|Is that not very hard]?"),
        ("A", "ans", "[No, but how hard can it be?|Not really, but I have seen it.|No, but I have a plan.]"),
        ["They [worked|tried] all morning, and [at first all went well|they laughed a lot].",
         "They [carried everything|brought all they needed] to the old shed and began."],
        ["But then {spoil}.", "But [they were in a hurry|they did not look for a moment], and {spoil}."],
        [("A", "sad",
          "[Now it is all spoiled|Everything has gone wrong]! [There is no time left.|What shall we do now?]"),
         "{A} [sat down on the floor|hid {his} face] and [wanted to cry|did not say a word]."])
    s.p(("B", "kind",
         "[Wait|Look again], {A}. [It is not what we planned, but it can still be good|Maybe we can make something "
         "new from it|It is not lost yet]."),
        ["{A} looked [again|at it from all sides]. Slowly, an idea came.",
         "They thought and thought, and then [both|they] began to [smile|laugh]."],
        ["Together they {fix}.", "So they {fix}, and it [took|needed] the whole afternoon."],
        ["The next morning, {E} opened the door, and there it was.",
         "On the birthday, {A} [shut {E}'s eyes with both {hands}|led {E} into the room]."],
        [("A", "low", "It is not what I wanted to make. [It went wrong|I made a mistake]."),
         ("A", "low", "[Happy birthday|This is for you]. [It went a little wrong|It is not perfect].")],
        ("E", "happy",
         "[It is the best present I ever had|It is wonderful|I have never seen anything so lovely]! [You made it "
         "with love|I can see how much you thought of me]."),
        ["They all [laughed|sang] and [danced around the table|ate until they were full].",
         "{E} [hugged|kissed] them both, and the [day|party] could begin."])
    s.ending("try", "kind", "friend")


def invention(s):
    s.season("spring", "summer", "autumn")
    need, first, fail, better, works = s.r.choice([("the well was far away, and everyone had to carry heavy water "
                                                    "every day",
                                                    "a cart with one wheel",
                                                    "the cart fell over, and all the water ran out",
                                                    "a second wheel and a lid", "not a drop was lost"),
                                                   ("the best apples grew at the very top of the tree, and nobody "
                                                    "could reach them",
                                                    "a very long stick", "the apples fell down and broke",
                                                    "a soft bag at the end of the stick",
                                                    "the apples fell softly into the bag"),
                                                   ("the birds ate all the seeds in {E}'s garden",
                                                    "a man of straw with a big hat",
                                                    "the birds sat on the hat and sang",
                                                    "little bells that rang in the wind",
                                                    "the birds flew off to the fields"),
                                                   ("{E} could not hear a knock at the door",
                                                    "a string with a spoon on it",
                                                    "the string broke at the first pull",
                                                    "a strong rope and a real bell",
                                                    "the bell rang all through the house"),
                                                   ("the stream was too wide to jump over, and all got wet feet",
                                                    "a bridge of straw", "the straw got wet and fell apart",
                                                    "two long logs and some strong rope", "the bridge stood firm")])
    s.slots.update(need=s.t(need), first=first, fail=fail, better=better, works=works)
    s.p(s.opening(),
        ["But there was a problem: {need}.", "In that place, {need}.",
         "There was one thing that troubled everyone: {need}."],
        [("A", "", "[There must be a better way|Somebody should do something about it|I will think of something]."),
         "{A} thought about it [day and night|for three days]."])
    s.p(s.day() + "{he} had an idea.",
        ["{A} [took some wood, a hammer and nails|looked for everything {he} needed] and made {first}.",
         "{he} worked [until noon|for hours], and then {first} was ready."],
        [Seq(("B", "?", "[What is that|What are you making|Does it work], {A}?"),
             ("A", "ans", "[You will see|Wait and see]. [It will help us all|It is my new invention]."))],
        ["Everyone came to [watch|see it]. But {fail}.", "{A} tried it at once. But {fail}."],
        ["Some [laughed|giggled], and {A}'s face grew hot.",
         "{A} [wanted to throw it all away|felt foolish] and went [home|away] without a word."])
    s.p([Seq("But {B} came after {him}.",
             ("B", "kind",
              "[It was a good idea|I liked it]. [It only needs one more thing.|You are almost there.|Why did it "
              "fail?]")),
         Seq("{C} had seen it too.",
             ("C", "kind",
              "[Nothing works the first time|I failed a hundred times when I was young]. [Look closely at what went "
              "wrong|Ask why it failed]."))],
        ["{A} thought about that. What was missing?", "{A} [sat down|looked at it again] and thought [hard|slowly]."],
        [("A", "happy", "[I know|I have it]! It needs {better}!"), "Then {he} knew: it needed {better}."],
        ["All [the next day|the next morning] {A} and {B} worked [side by side|together].",
         "{B} helped, and they worked [until it was dark|all the next day]."],
        ["Then they tried it again, and {works}!", "This time {works}!",
         "Once more everyone came to watch, and this time {works}."],
        ["Everyone [cheered|clapped].", "?Nobody laughed now.",
         ("C", "happy", "[Well done|That is very clever], {A}! [I am proud of you|You did not give up].")],
        ["?{A} [bowed|smiled] and pointed to {B}, who had helped so much.",
         "?From then on, [life was easier|work was easier] for all of them."])
    s.ending("try", "try", "friend")


def promise(s):
    s.season("spring", "summer", "autumn")
    job, late, cost = s.r.choice([("water {E}'s little tree before the evening", "the little tree",
                                   "its leaves hung down"),
                                  ("feed the hens at noon", "the hens", "the hens stood at the gate and called"),
                                  ("close the garden gate so that the goats stay out", "the garden gate",
                                   "the goats stood among the beans"),
                                  ("bring in the clean washing before the rain", "the washing",
                                   "the first drops were falling on the shirts"),
                                  ("visit {C} and read a story aloud", "the story",
                                   "{C} sat at the window and waited"),
                                  ("light the lamp at the corner when it gets dark", "the lamp",
                                   "the road was dark and nobody could see the way")])
    s.slots.update(job=s.t(job), late=s.t(late), cost=s.t(cost))
    s.p(s.opening(), s.day("morning") + "{E} had to go to [town|the market].",
        ("E", "kind",
         "[Will you do something for me, {A}?|I need your help, {A}.] [Please {job}|It would be good if you could "
         "{job}]."),
        ("A", "ans", "[I promise|Yes, I promise|Of course, I promise]. [You can trust me|I will not forget it]."),
        "?{E} [smiled|waved] and went off.")
    s.p(["Soon after, {B} came by with a {adj} {thing}.", "But then {B} [knocked|came] with a {adj} {thing}."],
        ("B", "happy", "[Come and play|Come with me]! [We can {use}|I want to show you something] {at}."),
        ["{A} [looked back once|thought of the promise], [but the day was long|but there was still time].",
         ("A", "low", "[Just for a short time|Only for a little while]. Then I will go back.")],
        ["They played and [laughed|ran], and the hours [flew away|went by].",
         "It was so much fun that {A} forgot everything [else|around {him}]."],
        ["Then the sun [was low|went behind the trees], and {A} [jumped up|stood still].",
         "Suddenly {A} [stopped|turned pale]."],
        ("A", "loud", "[Oh no|Oh dear]! [My promise|I forgot {late}|What have I done]!"),
        "{he} ran [home|back] as fast as {he} could. When {he} came there, {cost}.")
    choice = s.r.random()
    s.p([("A", "sad", "[I am too late|It is my fault]. [I must make it good again|But I can still try]."),
         "{A} [did not rest|did not stop to think] for a moment."],
        ["{B} had run after {him} and helped, and they worked [hard|fast] until [all|everything] was right again.",
         "{he} [did|worked at] what {he} had promised, and {he} did it [with great care|twice as well as before]."],
        ["When {E} came home, {A} [stood at the door|waited at the gate].", "In the evening {E} came back."],
        [("A", "sad",
          "I have to tell you something. I [forgot|almost forgot] my promise because I was playing. [I am sorry|I "
          "am very sorry].")
         if choice < 0.6 else
         ("A", "low",
          "I [almost forgot|forgot for a while], because I was playing. But [I came back|then I ran]. [I am sorry|I "
          "am sorry that it was so late].")],
        ("E", "kind",
         "[Thank you for telling me|It is good that you tell me the truth]. [And you made it good again|Everyone "
         "forgets sometimes|Next time you will remember]."),
        ["?{A} [breathed out|felt better]. ",
         "?From then on, {A} tied a [red|blue] string around one {hand} to remember {his} promises.",
         "?Then they ate supper together, and {B} stayed too."])
    s.ending("honest", "honest", "try")


def storm(s):
    s.season("autumn", "winter", "spring")
    s.p(s.opening(),
        ["?{his} home was not big, but it was [dry|warm].",
         "?{he} had only one chair and one cup, but they were [good ones|enough]."])
    snow = s.slots["season"] == "winter"
    s.slots["storm"] = "snow" if snow else "rain"
    s.p("One {season} evening, [the wind began to blow|dark clouds came over the hills|the sky turned black]. " +
        s.t("[Soon the {storm} fell so thick that nobody could see the fence|It [blew|roared] around the house all "
            "night, and the {storm} fell and fell]."
            if snow else
            "[Soon the {storm} drummed on the roof|It roared around the house, and the {storm} fell in thick "
            "drops]."),
        "?{A} [sat by the fire|made some tea] and was glad to be at home.",
        ["Then somebody knocked at the door.", "Suddenly there was a knock at the door. Knock, knock, knock!"],
        ("A", "?", "Who is [there|out there] [in such a storm|so late]?"),
        ("B", "sad",
         "It is me, {Bn}{bthe}! [The storm has broken my roof|The wind has blown down my home]. [May I come in|Can "
         "I stay with you]?"),
        ("A", "kind", "[Of course|Come in, quickly]! [Sit by the fire|You must be cold|There is room for two]."))
    s.p(["{B} had just [sat down|become warm] when there was another knock. It was {D}, [wet|cold] from head to toe.",
         "A little later {D} came too, and {A} [opened the door wide|found a dry blanket]."],
        [Seq(("D", "sad", "[Is there room for one more|I lost my way in the storm. May I come in]?"),
             ("A", "ans",
              "[Where two can sit, three can sit|There is always room for a friend|We will sit a bit closer].")),
         ("B", "low", "It is a little narrow, but it is [warm|very cosy].")],
        ["There was only one [blanket|bowl of soup], but they shared it.",
         "They [made soup from all that was left|shared the last bread]."],
        ["{D} told a [funny|long] story, {B} sang a song, and {A} [laughed until {he} forgot the storm|kept the "
         "fire warm].",
         "To pass the time, they [told riddles|sang songs] until [they fell asleep|the fire was low]."])
    s.p(["In the morning the storm was over. [The sun came out|The sky was clear], and the whole world [shone|"
         "looked new].",
         "When they woke up, it was quiet outside. The storm had gone."],
        ["But {B}'s roof [lay in the field|was gone].",
         "They went to look at {B}'s home, and [{B} began to cry|it looked very bad]."],
        ("A", "kind",
         "[We will build it up again|Together we can mend it]. [Many helpers make light work|I will bring wood, and "
         "{D} will bring the nails]."),
        ["All day they [carried wood|hammered and sawed], and in the evening the roof was [better than before|"
         "ready].",
         "So they [worked|hammered and sawed] [until evening|the whole day], and the new roof was [strong and "
         "straight|even better than the old one]."],
        s.thanks("B", "A"))
    s.ending("friend", "share", "kind")


def mistake(s):
    s.season()
    thing = s.r.choice(["blue [cup|bowl|pot]", "[big|old] [jug|clock|mirror]", "[flower|honey] pot",
                        "glass [bowl|lamp|bird]"])
    s.slots["vase"] = s.t(thing)
    s.slots["short"] = s.slots["vase"].split(" ", 1)[1]   # "the clock" for "the old clock"
    s.p(s.opening(), ["{E} had a [fine|lovely|precious] {vase} that stood [on a shelf|by the window].",
                      "On the shelf stood a {vase} that {E} loved [very much|more than anything]."])
    s.p(s.day("[afternoon|morning]") +
        "{A} was playing [inside|in the house] with {his} {adj} {thing}, [although {E} had said not to|as {he} "
        "often did].",
        ["{he} [turned|jumped|danced] a little too fast. Crash! The {short} lay on the floor in [many|three|five] "
         "pieces.",
         "[Bump|Bang]! {his} back hit the shelf, and the {short} fell down and broke."],
        [("A", "low", "[Oh no|Oh dear]! [What have I done|What shall I do now|{E} will be so sad]!"),
         "{A} stood very still. {his} heart [beat fast|jumped]."],
        ["Quickly {he} [hid|pushed] the pieces under the [bed|chair|carpet] and ran outside.",
         "{he} put the pieces in a bag and hid it [behind the door|under the bed|{at}]."])
    s.p(["But {A} could not play any more. {his} [stomach|heart] felt as heavy as a stone.",
         "At supper the soup had no taste, and {A} [could not look up|did not say a word]."],
        [Seq("{B} [saw it|noticed it].", ("B", "kind", "[What is wrong|Why are you hiding something], {A}?"),
             ("A", "sad",
              "I broke {E}'s {vase}, and I [hid the pieces|told nobody]. [I am afraid.|What if {ehe} is angry?]"),
             ("B", "kind",
              "[Tell {ehim} the truth|Then tell {ehim}]. [I will come with you|It will feel better]. [A secret like "
              "that only grows|The truth is not so heavy].")),
         Seq(("E", "?", "[Has anyone seen|Where is] my {vase}?"),
             "{A} [said nothing|looked away], and [the heavy feeling grew|{his} ears became hot].",
             "?That [made it even worse|was not a lie, but it felt like one]."),
         ("A", "low", "[It only gets worse|I cannot hide forever]. [I must tell {ehim}|I have to say it].")],
        ["At last {A} [took a deep breath|was brave] and went to {E}.",
         "So {he} [took the pieces|fetched the pieces] and [carried|brought] them to {E}."])
    s.p(("A", "sad",
         "[I broke it|It was me], {E}. I [was playing|was not careful], and then I [hid the pieces|was afraid to "
         "tell you]. I am [so|very] sorry."),
        ["{E} was quiet for a moment.", "{E} looked at the pieces [for a long time|and sighed]."],
        ("E", "kind",
         "[I am sad about|I loved] the {short}. But [I am glad that you told me|you are more important than a "
         "{short}|it was brave to tell me the truth]."),
        ["Then {ehe} [brought|fetched] the glue, and [together they put the pieces together|piece by piece they "
         "mended it].",
         "The next day they glued it [together|piece by piece], and it took [a long time|many hours]."],
        ["You could still see the cracks, but {E} said that they [looked like little rivers|told a story].",
         "It was not as good as new, but [now it had a story|they both liked it even more]."])
    s.ending("honest", "honest", "brave")


def newcomer(s):
    s.season()
    s.p(s.opening(),
        s.day() + ("[somebody new|a stranger] moved into the empty [hollow|den] [next to the big tree|across the path]."
                   if s.animals else
                   "a cart [full of boxes|with chairs and boxes] stopped at the empty house "
                   "[next door|across the road]."),
        ["It was {Bn}, a [young|small] {bkind} [from far away|from the other side of the mountain].",
         "The new neighbour was a {bkind} named {Bn}, [who knew nobody|who had come from far away]."])
    s.p(["{B} [sat alone on the step|stood alone by the gate] and [watched|looked at] the others, but {bhe} did not "
         "[say a word|come closer].",
         "Every day the others played {at}, and every day {B} only [watched from far away|looked on]."],
        [Seq(("D", "?", "[Why does {bhe} never speak|Is {B} too proud to play]?"),
             ("A", "ans",
              "[Maybe {bhe} is only shy|I think {bhe} is lonely]. [I know how that feels|I would be too, in a new "
              "place].")),
         Seq(("A", "?", "{E}, [why does nobody play with {B}|why is {B} always alone]?"),
             ("E", "kind",
              "[Perhaps nobody has asked|A new place is hard at first]. [Think what you would like if you were new|"
              "You could be the first]."))],
        ["{A} thought about it [all night|for a while].", "?That gave {A} an idea."],
        ["The next day {he} took {his} {adj} {thing} and [went over|walked across].",
         "So {A} [baked|packed] some [cakes|little cakes], took {his} {adj} {thing} and [went to see {B}|went "
         "over]."])
    s.p(("A", "kind",
         "[Hello|Good morning], I am {A}. [Would you like to see my {thing}|Do you want to try my {thing}]? We can "
         "{use}."),
        ["{B} [looked up|turned red]. [For a moment, nobody spoke|At first {bhe} could not answer].",
         "{B} [looked at the {thing}|smiled a very small smile]."],
        ("B", "low", "[I have never had one|I would like that]. But [I am not good at it|I do not know how]."),
        ("A", "ans", "[I will show you|That does not matter|Nobody is good at the start]. [Come|It is easy]!"),
        ["Soon they were both laughing, and {B} [was not shy any more|talked and talked].",
         "They tried it together, and [when it went wrong, they laughed|soon {B} could do it too]."],
        ["Then {B} showed {A} a [game|song|dance] from {bhis} old home, and it was [very funny|new and lovely].",
         "{B} knew [wonderful stories|many riddles] from far away, and {A} [wanted to hear them all|could not hear "
         "enough]."],
        ["Then {D} came [too|closer] and asked to join, and [nobody was alone|now they were three].",
         "The next day, all the others came too, [and {B} was one of them|and there was always laughing at {B}'s "
         "door]."])
    s.ending("friend", "kind")


def skill(s):
    season = s.r.choice(["spring", "summer", "autumn", "winter"])
    verb, goal, again, tip = s.r.choice([("skate", "glide over the ice", "fell on the ice",
                                          "Look ahead, and not at your feet"),
                                         ("ski down the hill", "fly down the white hill", "rolled down in the snow",
                                          "Bend your knees a little")]
                                        if season == "winter" else
                                        [("whistle", "whistle like a bird", "only blew air",
                                          "Make your mouth small and round"),
                                         ("swim", "swim across the pond", "went under and coughed",
                                          "Lie on the water like a leaf"),
                                         ("play the flute", "play a whole song", "made a sound like an angry goose",
                                          "Play one note, and then the next one"),
                                         ("ride", "ride on the grey pony", "slid down into the grass",
                                          "Sit straight and breathe slowly"),
                                         ("dance", "dance at the harvest feast", "fell over {his} own feet",
                                          "Listen to the music and count to three"),
                                         ("read", "read the big book alone", "mixed up all the letters",
                                          "Take one word after the other")])
    s.season(season)
    s.slots["theday"] = "those days"
    s.slots.update(verb=verb, goal=goal, again=s.t(again), tip=tip)
    s.p(s.opening(),
        ["{A} had one big wish: {he} wanted to {goal}.",
         "There was something {A} wanted more than anything: to {goal}."],
        ["?{B} could {verb} very well, and {A} always watched.", "?All the others could {verb}, only {A} could not."])
    s.p(s.day() + "{he} tried it for the first time.",
        ["But {he} {again}.", "{he} took a deep breath, tried, and {again}."],
        ["{he} tried again, and again {he} {again}.", "?The second time was no better.",
         "?Again and again {he} tried."],
        ["Someone [behind {him}|nearby] laughed.", "?{A}'s ears [turned red|became hot]."],
        [("A", "sad", "I will never learn [it|to {verb}]. [It is too hard|I am not made for it]."),
         ("A", "sad", "[Everyone can do it but me|It is no use]. [I give up|I will not try again].")],
        [Seq("{B} sat down beside {A}.",
             ("B", "kind",
              "[Do you think I could do it on the first day?|When I began, I was worse than you.] [I needed a whole "
              "year|It took me a long time too].")),
         Seq("{C} had watched it all.",
             ("C", "kind",
              "[You are doing better than you think|The first days are the hardest]. [Try it a little every day|Do "
              "not stop now]."))])
    s.p([("B", "kind", "{tip}. [I will show you|Watch me]."),
         ("B", "", "[Let me tell you a secret|Here is a little trick]. {tip}.")],
        ["So {A} [practised|tried] every day, [in the morning and in the evening|a little longer each time].",
         "From that day on, {A} [practised|went out and tried] each [day|afternoon], and {B} [helped|came along]."],
        ["On the [third|fifth] day, it went a little better.", "?Some days were good, and some were bad.",
         "?Slowly, very slowly, it became easier."],
        ["And then, one [day|morning], it happened: {A} could {verb}!",
         "One day {he} [forgot to be afraid|did not think about it at all], and suddenly it worked."],
        [("A", "happy", "[Look, look|Did you see that|I can do it], {B}! [I can {verb}|It works]!"),
         "{A} [shouted|laughed] so loudly that everyone came to look."],
        ("B", "happy", "[I knew it|I always knew that you could do it]! [You never gave up|I am proud of you]."),
        ["?Even those who had laughed [clapped now|now wanted to know how {he} did it].",
         "?Soon a smaller child came and asked for help, and {A} [said yes|showed how to do it]."
         if not s.animals else
         "?Soon a very small {dkind} came and asked for help, and {A} [said yes|showed how to do it]."])
    s.ending("try", "try", "wait")


def seed(s):
    s.season("spring")
    plant, result = s.r.choice([("sunflower", "a great yellow flower"), ("pumpkin", "a big round pumpkin"),
                                ("bean", "a tall green bean plant"), ("tomato", "a bush full of red tomatoes"),
                                ("strawberry", "a row of sweet red strawberries")])
    s.slots.update(plant=plant, result=result)
    s.p(s.opening(), s.day("morning") + "{E} [gave {him}|put into {his} {hand}] a [tiny|small brown] seed.",
        ("A", "?", "[What is it|Is that all|What can I do with it]?"),
        ("E", "ans",
         "[A {plant} is asleep inside|It will be a {plant} one day]. [Plant it and take care of it|You only need to "
         "help it a little]."))
    s.p(["{A} [dug|made] a hole {at} and put the seed into the [dark|soft] earth.",
         "{he} found a sunny spot {at} and planted the seed there."],
        "{he} gave it water [every day|each morning] and waited.",
        ["One day went by, then two, then three. Nothing happened.",
         "But nothing happened, [not on the first day and not on the second|though {he} looked ten times a day]."],
        [("A", "sad",
          "[It is sleeping too long|Maybe it is dead|It does not like me]. [I will dig it up and look|I do not want "
          "to wait any more]."),
         "{A} [stamped|sighed] and wanted to dig it up."],
        [("B", "kind",
          "[Do not dig it up|Wait a little longer]! [It is working under the ground|You cannot see it, but it is "
          "growing]."),
         ("C", "kind",
          "[Have patience|Let it be]. [Roots come before leaves|You cannot pull a plant to make it grow].")],
        ["So {A} and {B} [told each other stories while they waited|took turns with the water].",
         "To make the waiting shorter, {A} and {B} [built a little fence|painted a sign]."])
    s.p(["Then, after a [warm rain|week], a green [tip|leaf] looked out of the earth.",
         "And one morning there was something green, [no bigger than a tear|as thin as a thread]."],
        ("A", "happy",
         "[It is alive|Look, it is growing|Good morning, little plant]! [Come quickly, {B}|Come and see]!"),
        ["When a [cold wind|big storm] came, they covered it with [an old hat|a blanket].",
         "When the [snails|goats] came, {A} [carried them away|kept watch]."],
        ["All through the summer it grew and grew, and in the end there was {result}.",
         "By the end of the summer, there was {result}."],
        ["{A} was so proud that {he} [invited everyone|called the whole village].",
         "{A} [shared it with|showed it to] {B} and {E}, and they [were full of joy|had a feast]."],
        ["And {he} kept [a few seeds|one seed] for the next [spring|year].",
         ("E", "happy", "[See what a small seed can do|You waited well]. [I am proud of you|That was good work].")])
    s.slots.update(season="summer", theday="the little seed")
    s.ending("wait", "wait", "share")


def race(s):
    s.season("spring", "summer", "autumn")
    prize = s.r.choice(["a golden cup", "a big honey cake", "a crown of flowers", "a silver medal",
                        "a bright blue ribbon"])
    s.slots["prize"] = prize
    s.p(s.opening(),
        ["Every {season} there was a great race, [from {pl} to {pl2} and back|all the way to {pl} and back]. The "
         "winner got {prize}.",
         "{A} could run fast, and the great {season} race was near. The prize was {prize}."],
        ["?{A} [trained|ran] every morning, up the hill and down again.", "?{he} dreamed of {prize} every night."])
    s.p(["On the day of the race, everyone stood at the line. {weather}.", "The big day came, and {weather}."],
        [Seq(("D", "happy",
              "[I am going to win|Nobody is faster than me]. [You will only see my back|Just you wait]!"),
             ("A", "ans", "[We will see|Let us see]. [Good luck|May the best one win]!")),
         ("E", "kind", "[Run well|Good luck], {A}. [And have fun|I will wait for you here].")],
        ["One, two, three, go! They all ran, and the dust flew.", "The bell rang, and off they went."],
        ["Soon {A} was [in front|ahead of all the others].", "At {pl}, {A} was [the first|far ahead]."],
        ["Then {he} heard a cry. {B} had [fallen|slipped] and [held one foot|could not get up].",
         "But then {he} saw {B}, who lay [beside|by] the path and [cried|held one foot]."],
        ["{A} looked at the [road|path] ahead. The prize was so near!",
         "{A} [slowed down|stopped]. If {he} helped now, {he} would lose."])
    s.p([("B", "sad", "[Go on|Run], {A}! [You can still win|Do not wait for me]."),
         ("B", "sad", "[I cannot walk|My foot hurts so much]. [But you should go on|Please run on].")],
        ("A", "kind",
         "[There will be another race|I can run again next year]. [A friend is more important|I will not leave you "
         "here]."),
        ["{he} [let {B} lean on {him}|tied a cloth around the foot], and slowly they walked [on|together].",
         "{A} helped {B} up, and they [walked|went] step by step."],
        "{D} ran past them and [won|came in first].",
        ["When {A} and {B} came to the line, they were the very last. But [everyone stood up and clapped|how "
         "everyone cheered]!",
         "They came in last of all. It was quiet for a moment, and then [everyone clapped|a great cheer went up]."],
        ["{D} looked at {prize}, and then at {A}.", "{D} came up to them with {prize}."],
        ("D", "low",
         "I was the fastest, but [you were the best|you did the better thing]. [Let us share it|This is yours too]."),
        ["So they shared the prize, and all three were [happy|glad].",
         "{A} [laughed|smiled], and the three of them [became good friends|stood there together]."])
    s.ending("kind", "friend")


def noise(s):
    s.season()
    sound, cause, after = s.r.choice([("tap, tap, tap", "a branch that knocked at the window in the wind",
                                       "{A} opened the window and tied the branch back with a ribbon"),
                                      ("scratch, scratch", "a small, wet kitten at the door",
                                       "{A} dried the kitten and gave it warm milk"),
                                      ("hoo, hoo, hoo", "a young owl that had lost its mother",
                                       "{A} held up the lantern until the mother owl came"),
                                      ("drip, drop, drip", "an old bucket under a hole in the roof",
                                       "{A} put a cloth into the bucket, and it was quiet"),
                                      ("creak, creak", "the garden gate that somebody had left open",
                                       "{A} closed the gate and gave it a friendly pat"),
                                      ("squeak, squeak", "a tiny mouse that could not get out of a jar",
                                       "{A} tipped the jar, and the mouse ran out and bowed")])
    s.slots.update(sound=sound, cause=cause, after=s.t(after))
    s.p(s.opening())
    s.p("One {season} night, {A} [lay awake in bed|could not sleep]. [The house was dark|The moon was behind the "
        "clouds], and everything was [still|quiet].",
        "Then {he} heard it: {sound}.",
        ["{A} pulled the blanket over {his} head. There it was again: {sound}!",
         "{A} sat up. Again it went {sound}."],
        ["What could it be? [A giant|A dragon|A robber|A ghost]? {his} heart beat [fast|like a drum].",
         "{A} thought of [giants|dragons|ghosts], and {his} [nose|ears] grew cold."])
    s.p(["{he} [crept|went] to {B}, who was staying for the night, and [woke {bhim}|shook {bhim} gently].",
         "{B}, who was staying for the night, [sat up too|woke up]."],
        ("A", "low", "[Did you hear that|Are you awake|Do you hear it too], {B}?"),
        ("B", "low",
         "[Yes|Yes, I heard it too|Shh, listen]. [It comes from over there.|What do you think it is?|It sounds like "
         "something big.]"),
        [("A", "low", "I am [afraid|scared]. But I [want to know what it is|cannot sleep if I do not know]."),
         ("B", "low",
          "[Let us hide|I am afraid to look]. [Or shall we look together|Or maybe it only wants to come in]?")],
        ["So they took the lantern and went [on tiptoe|very quietly] through the dark, {hand} in {hand}.",
         "They lit a [candle|lantern], held each other tight and [crept|went] closer."],
        ["?Every shadow looked like a [monster|giant].", "?The floor creaked, and they both jumped.",
         "?One step, two steps, three steps."],
        "{sound}, it went, [louder now|quite near].")
    s.p(["{A} counted to three and [looked|held up the light].",
         "Then {A} took a deep breath and [looked|held up the light]."],
        ["It was no [giant|dragon|ghost]. It was only {cause}!", "And what was it? It was {cause}!"],
        [("B", "happy", "[And I was so afraid|That is our monster]! [How silly we were|What a small monster it is]."),
         "They looked at each other and [burst out laughing|laughed until they had to sit down]."],
        "{after}.",
        ["{E} came with [messy hair|a candle] and [wanted to know|asked] why they were laughing in the middle of "
         "the night.",
         "?Now that they knew the sound, it was not [frightening|scary] any more."])
    s.p(["Then they went back to bed.", "Soon they were under [their|the] warm blankets again."],
        [("A", "low",
          "[The sound was big, but the thing was small|It is good that we looked|I am glad that you were with me]."),
         ("B", "low", "[You were very brave|I am glad that we looked]. Good night, {A}.")],
        ["{A} [knew now|had learned] that " + s.r.choice(MORALS["brave"]) + ".",
         "In the dark, most things look bigger than they are, {A} thought."],
        ["And [before long|soon], they were both [asleep|fast asleep].",
         "And they slept [well|soundly] until the [morning|sun came up]."])


def moon(s):
    s.season("spring", "summer", "autumn")
    s.p(s.opening(),
        ["Every [evening|night], {A} looked up at the moon and wished that {he} could [hold it|take it home|touch "
         "it].",
         "But {his} greatest wish was to [hold|touch|have] the moon."])
    s.p(["One {season} evening, the moon was [big and round|as round as a plate], and it [seemed very near|sat on "
         "top of the hill].",
         "One [quiet|clear] {season} evening, the moon came up, [big and yellow|round and white], behind the trees."],
        ("A", "",
         "[Tonight I will get it|Now it is close enough]. [I only need to climb high|I will bring it home]."),
        ["First {he} climbed a tall tree, but the moon was [still far away|higher].",
         "{he} took a ladder and climbed on the roof, but {he} could not reach it."],
        ["Then {he} ran up the hill, but the moon [ran too|was always one step ahead].",
         "?{he} even threw a rope, but it fell down on {his} own head."],
        ["{B} heard the noise and came to look.", "By {pl2} {he} met {B}."],
        ("B", "?", "[What are you doing|Where are you going] [so late|in the dark], {A}?"),
        ("A", "ans", "I want to [catch|get] the moon. [It would shine in my room|Then it would be mine]."),
        ("B", "happy",
         "[I saw one in the pond|There is one in the pond]. [Come, I will show you|Maybe we can pull it out]!"))
    s.p(["And really, there was the moon in the water, [white and still|round and bright].",
         "They ran to the pond, and there lay the moon, right in the water."],
        ["{A} put a bucket into the water [very slowly|with care] and pulled it up. In the bucket was [a moon|the "
         "moon], but it [shook and broke|broke into a hundred pieces].",
         "{A} [reached|bent down] to take it, but it broke into a hundred [bright|little] pieces."],
        ("A", "sad", "[I have broken it|Now it is gone]! [I did not want that|I only wanted to hold it]."),
        ["But {B} pointed up. The moon was [still in the sky|where it had always been].",
         "Then the water grew still, and there it was again, as round as before."],
        [("B", "kind",
          "[It belongs to the sky|Nobody can own it]. [But it shines for all of us|It is there for you and for me]."),
         ("C", "kind",
          "[The moon cannot be kept|The moon belongs to everyone], little one. [But you can look at it every night|"
          "That is why all can see it].")],
        ["{A} was quiet for a while. It was true: the light was on the [water|grass], on the roofs and on {his} own "
         "{hands}.",
         "Then {A} saw that the light was everywhere, [on the grass and on the roofs|on {B}'s nose and on {his} own "
         "{hands}]."],
        [("A", "happy",
          "[Then I have it already|Then it is mine and yours]. [And I do not need to carry it|We can share it]."),
         "They sat down side by side and [watched it|looked up] until they were sleepy."])
    s.p(["Then {A} went home, and the moon [came along|walked with {him}], [all the way to the door|over the trees].",
         "On the way home, the moon followed {A} [to the door|all the way]."],
        ["{A} had learned that [some things are most beautiful when you let them be|the best things belong to "
         "everyone].",
         "{he} left the curtain open that night, and the moon looked in.",
         ("A", "low", "Good night, moon. [Shine for everyone|See you tomorrow].")],
        ["?And soon {he} was asleep.", "?And the moon shone [softly|quietly] on the bed.",
         "?It had been a good evening."])


def gift(s):
    s.season()
    made, how = s.r.choice([("a little boat out of bark", "cut the bark and made a sail from a leaf"),
                            ("a chain of painted acorns", "painted each acorn in another colour"),
                            ("a soft pillow full of wool", "gathered wool from the fences and sewed it up"),
                            ("a lamp out of an old jar", "painted stars on the glass"),
                            ("a small wooden bird", "carved the wood with great care"),
                            ("a book of drawings",
                             "drew one picture for every day of the year they had known each other"),
                            ("a song", "wrote a song with three verses")])
    s.slots.update(made=made, how=how)
    s.p(s.opening(),
        s.day("morning") +
        "{A} [remembered|thought of] something: [soon it was {B}'s birthday|{B} had a birthday in three days]!",
        ["?{he} wanted to give {B} the most beautiful present of all."])
    s.p(["At the market there was a {adj} {thing}, and it was [just right|perfect].",
         "In the window of the shop stood a {adj} {thing}."],
        [Seq(("A", "?", "How much does it cost?"), ("C", "ans", "[Ten|Five|Twelve] [silver|gold] coins.")), ""],
        ["But {A} had only [two small coins|one coin|three nuts and a button].",
         "{A} [looked into {his} pockets|turned out {his} pockets] and found only [two|three] small coins."
         if not s.animals else
         "{A} counted {his} coins. There were only [two|three]."],
        [("A", "sad",
          "[I can never pay for that|It is not enough]. [Now I have nothing for {B}.|What can I give now?]"),
         "{A} went [home|away] with a [heavy heart|sad face]."],
        [Seq(("E", "?", "[Why are you sad|What is wrong], {A}?"),
             ("A", "sad", "I [wanted to buy|cannot buy] a present for {B}. [I have no money|It costs too much]."),
             ("E", "kind",
              "[What can you do with your own {hands}|Must a present be bought]? [Think about it|A gift from the "
              "heart costs nothing]."))])
    s.p(["{A} thought about that, and an idea began to grow.", "Then {A} had an idea."],
        "{he} [would make|wanted to make] {made}.",
        ["All the next day {he} sat at the table and {how}.",
         "{he} sat down [under a tree|in {his} room] and {how}."],
        ["?Twice it went wrong, and twice {he} began again.",
         "?It was hard work, but {A} [hummed|smiled] all the time.",
         "?When it was done, {he} was not sure if it was good enough."],
        ["On the birthday, the others came with [big boxes|shiny boxes]. {A} [waited until the end|stood at the "
         "back].",
         "Then came the birthday, and {A}'s heart [beat fast|beat like a drum]."],
        ("A", "low", "[It is only a small thing|I have not bought anything]. [I made it for you|I made it myself]."),
        ["{B} [looked|was silent] for a long time, and then {bhis} eyes [shone|were wet].",
         "{B} [held {bhis} breath|did not say anything at first], and then {bhe} began to smile."],
        ("B", "happy",
         "[You made it yourself|You made this for me]? [Nobody ever gave me something so beautiful|It is the best "
         "present of all]!"),
        ["{B} showed it to everyone and kept it [next to the bed|where {bhe} could always see it]."
         if made != "a song" else
         "And {B} sang it [all day long|for everyone, again and again].",
         "And all the others wanted to [know how {A} had made it|learn how to make one too]."])
    s.ending("kind", "kind", "friend")


PLOTS = [lost, quarrel, fear, sharing, little_one, plan, invention, promise, storm, mistake, newcomer, skill, seed,
         race, noise, moon, gift]


def story(rng):
    s = Story(rng)
    rng.choice(PLOTS)(s)
    return "\n\n".join(s.paras)


def stories(seed, n):
    """Yield n distinct stories."""
    rng, seen = random.Random(seed), set()
    while len(seen) < n:
        text = story(rng)
        key = hash(text)
        if key not in seen:
            seen.add(key)
            yield text


def main():
    ap = argparse.ArgumentParser(description="print or write short children's stories")
    ap.add_argument("--n", type=int, default=3)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--out", help="write to this file, stories separated by a line with ***")
    a = ap.parse_args()
    texts = stories(a.seed, a.n)
    if a.out:
        with open(a.out, "w") as f:
            f.write("\n***\n".join(texts))
    else:
        print("\n\n***\n\n".join(texts))


if __name__ == "__main__":
    main()
