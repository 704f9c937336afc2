//! The tables of language detection: scripts, function words and letters.
//!
//! These are data, taken so that decisions agree with the `laya` package (version 0.4.15, <https://pypi.org/project/laya/>, by Convai
//! Innovations), whose file `laya/lang.py` is licensed under the Apache License, Version 2.0; see `NOTICE` and `LICENSE-APACHE` at the root of
//! the repository. Changed here: rearranged into sorted lists and ranges. The code that reads them is this project's.

/// Scripts by ranges of code points, ascending and disjoint. Latin is not among them.
pub const SCRIPTS: &[(u32, u32, &str)] = &[
    (0x0370, 0x03FF, "greek"),
    (0x0400, 0x052F, "cyrillic"),
    (0x0530, 0x058F, "armenian"),
    (0x0590, 0x05FF, "hebrew"),
    (0x0600, 0x06FF, "arabic"),
    (0x0750, 0x077F, "arabic"),
    (0x08A0, 0x08FF, "arabic"),
    (0x0900, 0x097F, "devanagari"),
    (0x0980, 0x09FF, "bengali"),
    (0x0A00, 0x0A7F, "gurmukhi"),
    (0x0A80, 0x0AFF, "gujarati"),
    (0x0B00, 0x0B7F, "oriya"),
    (0x0B80, 0x0BFF, "tamil"),
    (0x0C00, 0x0C7F, "telugu"),
    (0x0C80, 0x0CFF, "kannada"),
    (0x0D00, 0x0D7F, "malayalam"),
    (0x0D80, 0x0DFF, "sinhala"),
    (0x0E00, 0x0E7F, "thai"),
    (0x0E80, 0x0EFF, "lao"),
    (0x0F00, 0x0FFF, "tibetan"),
    (0x1000, 0x109F, "myanmar"),
    (0x10A0, 0x10FF, "georgian"),
    (0x1100, 0x11FF, "hangul"),
    (0x1200, 0x137F, "ethiopic"),
    (0x1780, 0x17FF, "khmer"),
    (0x1F00, 0x1FFF, "greek"),
    (0x2DE0, 0x2DFF, "cyrillic"),
    (0x3040, 0x309F, "kana"),
    (0x30A0, 0x30FF, "kana"),
    (0x3130, 0x318F, "hangul"),
    (0x31F0, 0x31FF, "kana"),
    (0x3400, 0x4DBF, "han"),
    (0x4E00, 0x9FFF, "han"),
    (0xA640, 0xA69F, "cyrillic"),
    (0xA8E0, 0xA8FF, "devanagari"),
    (0xAC00, 0xD7AF, "hangul"),
    (0xF900, 0xFAFF, "han"),
    (0xFB50, 0xFDFF, "arabic"),
    (0xFE70, 0xFEFF, "arabic"),
];

/// Function words of one language.
pub struct Words {
    /// ISO 639-1 code.
    pub code: &'static str,
    /// The words, lower case, separated by spaces.
    pub words: &'static str,
}

/// English first; among equal scores the earlier language wins.
pub const LANGUAGES: &[Words] = &[
    Words {
        code: "en",
        words: "after already always and any are aren as at be because been before being between both but can could \
                couldn didn didnt does doesn doesnt doing done dont down during each ever every few for from has \
                hasn have haven havent here him his how i if in into is isn isnt it ive many might much must never \
                nor not of on only onto our please shall she should some than that thats the their them then there \
                these they this those through to too until very was wasn wasnt we were weren what whats when where \
                which while who whom why will with within without won wont would wouldn yet you your youre yours",
    },
    Words {
        code: "fr",
        words: "alors au aux avec bien bonjour ce ces cette comment dans des deux dois doit donc du elle elles est \
                et fait fois il ils je jour jours la le les ma mais merci mes mois mon nous ont ou pas peut peux \
                plus pour pourquoi quand que qui sa ses sont sur ta tes ton tous tout toute trois très tu une veut \
                veux vous être",
    },
    Words {
        code: "de",
        words: "aber auch auf aus bei bitte das dem den der dich die diese diesen dieser dieses dir ein eine einem \
                einen einer für gibt habe haben heute ich im in ist jetzt kann kannst mein meine meinem meinen \
                meiner mich mir mit nach nicht noch oder sich sind und uns von wann was welche werden wie wir wird \
                wo wurde zu zum zur",
    },
    Words {
        code: "es",
        words: "al algo aquí aunque como con cuando del donde dos el entre es esa ese eso esta este esto está fue \
                fueron gracias han hay hemos hoy la las le les lo los mi muy más nada necesito ni nos para pero por \
                porque puede pueden que quiero se ser sobre son su sus también tengo tiene tienen todo tres tu un \
                una y ya",
    },
    Words {
        code: "pt",
        words: "agora ainda alguem alguém ali antes ao aos aqui as até boa cadê com como consigo da das depois deu \
                do dois dos e em entao então era esta estamos estava este estou está eu ficou fiz foi gostaria hoje \
                isso isto ja já mais mas meu meus minha minhas muito na nada nao nas nenhum nenhuma ninguem ninguém \
                noite nos nossa nosso não o obrigada obrigado olá onde ontem os para pela pelo pode podem por porque \
                pra preciso quando que quero sao se ser seu sou sua são tambem também tarde tem tenho três tudo tá \
                um uma vc vcs voce voces você vocês é",
    },
    Words {
        code: "it",
        words: "abbiamo adesso agli alla alle anche ancora avete che ci ciao col come con da dagli dal dalla dallo \
                degli dei del della delle dello deve devo devono di dove e ed era fra già gli grazie ha hai hanno ho \
                ieri il la le lo mai mi mia mio molto ne negli nel nell nella non o oggi per perche più poco quando \
                questa questo scusa sempre si sono stata stato su sua sul sulla sulle tra tuo un una uno voglio \
                vorrei è",
    },
    Words { code: "nl", words: "aan dat deze door een het is maar met naar niet ook op te van voor worden wordt zijn" },
    Words {
        code: "sv",
        words: "appen aterbetala aterbetalning att behover behöver blivit debiterade dessa detta faktura fel från \
                får ganger gång gånger gör göra hittar hjalp hjalpa hjälp hjälpa här installningarna installningen \
                inställningarna inställningen inte jag kommer kraschar kvittot losenord lösenord mig min mitt måste \
                nar när nästa och också om oppnar paket ska skicka skulle sparningen spårningen säger till tva två \
                upp uppdaterats utan vi vill är återbetala återbetalning öppnar",
    },
    Words {
        code: "ro",
        words: "aceasta această acest acesta acum ale care dar din după este foarte fost fără lui mi nu pentru până \
                sunt să trebuie vreau vă în și ți",
    },
    Words {
        code: "bn",
        words: "abar ajke akhon amader amake amar ami amra apnake apnar apnara apni ar asbe bhai bhalo bolte bolun \
                chai chaina dhonnobad dilam dite diye diyechi dorkar duibar ei eita ekbar ekhon ekhono ekta ferot \
                geche gese hobe hocche hoise hoye hoyeche hoyni jabe jodi jonno kalke keno keu kharap khub ki \
                kibhabe kichu kintu kivabe kobe kokhon korbo korchi kore koreche korechi koren korlam korsi korte \
                korun kothay koto lagbe moddhe nai niye oi oita onek ota pabo paini parben parbo parchi parchina \
                peyechi sathe shathe shob shomossa somossa tader tahole taka theke tomake tomar tomra tumi valo",
    },
    Words {
        code: "az",
        words: "amma ancaq artiq artıq bir biz bu cox daha deyil də eger görə həm hər ile ilə isə kimi lakin mən nə \
                olan olmasa olub onlar siz sonra sən ucun var ve və yalniz yalnız yox yoxdur çox üçün əgər",
    },
];

/// Words that Danish and Norwegian share with Swedish: they count, but name no language.
pub const NORDIC_OVERLAP: &str = "får hej ja jo kommer mig min nej om skulle tack vi";

/// Words that name Swedish in texts of two or three words.
pub const SHORT_SWEDISH: &str = "abonnemanget aterbetalning atkomst behover behöver betalningen fakturan felmeddelande glomt glömt \
    inloggningen installningen inställningen kvitto kvittot losenord lösenord sparningen spårningen \
    återbetalning åtkomst";

/// Foreign function words that are English words too: repeats of them count once.
pub const ENGLISH_LOOKALIKES: &str = "care come do im per plus son todo";

/// Lower-case letters that ordinary English does not use, ascending.
pub const FOREIGN_LETTERS: &str = "ßàáâãäåæçèéêëìíîïñòóôõöøùúûüýÿāăąćčďđēęěğģīıķļłńņňőœřśşšţťūůűźżžșțə";
